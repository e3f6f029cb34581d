# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`: several prompts, each with `n` choices; choice `i` of prompt `p` has the index
`p * n + i`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request

from vllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from vllm.entrypoints.openai.protocol.common import StreamOptions, UsageInfo
from vllm.entrypoints.openai.protocol.completion import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.serving_engine import EnginePrompt, OpenAIServing
from vllm.entrypoints.openai.streaming import EventStreamResponse, OutputStream, until_disconnect
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass
class _Answer:
    """What all parts of one answer share, and what was counted so far."""

    id: str
    model: str
    request: CompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text_offsets: dict[int, int] = field(default_factory=dict)

    @property
    def usage(self) -> UsageInfo:
        return UsageInfo.of(self.prompt_tokens, self.completion_tokens)


class OpenAIServingCompletion(OpenAIServing):
    """Handles completion requests."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | EventStreamResponse:
        """The whole answer, or with `stream` its events.

        Raises:
            ValueError: the request cannot be served.
            ClientGone: nobody waits for the answer any more; the engine was told.
        """
        return await until_disconnect(raw_request, self._create(request, raw_request))

    async def _create(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | EventStreamResponse:
        model = self.check_request(request, len(request.prompts))
        answer = _Answer(self.request_id("cmpl", raw_request), model, request)
        prompts = [await self._engine_prompt(prompt, request) for prompt in request.prompts]
        answer.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        is_default = "max_tokens" not in request.model_fields_set
        params = [
            self.sampling_params(
                request,
                self.max_tokens(prompt, request.max_tokens, "max_tokens", is_default),
                request.logprobs,
            )
            for prompt in prompts
        ]
        outputs = OutputStream(
            [
                self.generate(f"{answer.id}-{index}", prompt, prompt_params, request)
                for index, (prompt, prompt_params) in enumerate(zip(prompts, params))
            ]
        )
        await outputs.start()
        if request.stream:
            return EventStreamResponse(self._stream(answer, outputs), outputs)
        return await self._collect(answer, outputs, len(prompts))

    async def _engine_prompt(
        self, prompt: str | list[int], request: CompletionRequest
    ) -> EnginePrompt:
        if isinstance(prompt, str):
            return await self.tokenize(prompt, request.add_special_tokens, "prompt")
        return self.check_token_ids(prompt)

    async def _collect(
        self, answer: _Answer, outputs: OutputStream, num_prompts: int
    ) -> CompletionResponse:
        finals: list[RequestOutput | None] = [None] * num_prompts
        try:
            async for index, output in outputs:
                finals[index] = output
        finally:
            await outputs.aclose()
        n = answer.request.n
        choices = [
            self._choice(answer, prompt_index * n + output.index, final, output)
            for prompt_index, final in enumerate(finals)
            if final is not None
            for output in final.outputs
        ]
        return CompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=answer.usage,
        )

    def _choice(
        self, answer: _Answer, index: int, final: RequestOutput, output: CompletionOutput
    ) -> CompletionResponseChoice:
        answer.completion_tokens += len(output.token_ids)
        return CompletionResponseChoice(
            index=index,
            text=output.text,
            logprobs=_logprobs(answer, index, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
        )

    async def _stream(
        self, answer: _Answer, outputs: OutputStream
    ) -> AsyncIterator[CompletionStreamResponse]:
        options = answer.request.stream_options or StreamOptions()
        n = answer.request.n
        async for prompt_index, output in outputs:
            for piece in output.outputs:
                answer.completion_tokens += len(piece.token_ids)
                if not (piece.text or piece.finished() or piece.logprobs):
                    continue  # held back: it may become a stop string or a character
                index = prompt_index * n + piece.index
                choice = CompletionResponseStreamChoice(
                    index=index,
                    text=piece.text,
                    logprobs=_logprobs(answer, index, piece),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
                yield _chunk(answer, [choice], options.continuous_usage_stats)
        if options.include_usage:
            yield _chunk(answer, [], True)


def _chunk(
    answer: _Answer, choices: list[CompletionResponseStreamChoice], with_usage: bool
) -> CompletionStreamResponse:
    chunk = CompletionStreamResponse(
        id=answer.id,
        object="text_completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
    )
    if with_usage:
        chunk.usage = answer.usage
    elif answer.request.stream_options is not None and answer.request.stream_options.include_usage:
        chunk.usage = None
    return chunk


def _logprobs(answer: _Answer, index: int, output: CompletionOutput) -> CompletionLogProbs | None:
    """The logprobs of a (piece of a) choice; its offsets go on where the last piece ended."""
    if answer.request.logprobs is None or output.logprobs is None:
        return None
    offset = answer.text_offsets.get(index, 0)
    made = completion_logprobs(output.token_ids, output.logprobs, answer.request.logprobs, offset)
    answer.text_offsets[index] = offset + sum(map(len, made.tokens))
    return made

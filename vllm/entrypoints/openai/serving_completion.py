# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`: several prompts, each with `n` choices; choice `i` of prompt `p` has the index
`p * n + i`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.logprobs import (
    TokenName,
    completion_logprobs,
    id_of,
    prompt_logprobs,
    text_of,
)
from vllm.entrypoints.openai.protocol.common import RequestError, StreamOptions
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
from vllm.logprobs import Logprob, LogprobsOnePosition
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass
class _Answer:
    """What all parts of one answer share, and what was counted so far. `cached_tokens` is by
    prompt; `begun` are the choices of which a stream has told something."""

    id: str
    model: str
    request: CompletionRequest
    options: StreamOptions
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: list[EnginePrompt] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    text_offsets: dict[int, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs to tell at each position besides the token's own; None: none at all."""
        named = self.request.logprob_token_ids
        return self.request.logprobs if named is None else len(named)


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
        request_id = self.request_id("cmpl", raw_request, request)
        answer = _Answer(request_id, model, request, self.stream_options(request))
        answer.prompts = [await self._engine_prompt(prompt, request) for prompt in request.prompts]
        is_default = "max_tokens" not in request.model_fields_set
        # The engine draws a token at least; where none is wanted, it is not told.
        asked = 1 if request.only_echoes else request.max_tokens
        params = [
            self.sampling_params(
                request,
                prompt,
                self.max_tokens(prompt, asked, "max_tokens", is_default),
                request.logprobs,
            )
            for prompt in answer.prompts
        ]
        outputs = OutputStream(
            [
                self.generate(f"{answer.id}-{index}", prompt, prompt_params, request)
                for index, (prompt, prompt_params) in enumerate(zip(answer.prompts, params))
            ]
        )
        await outputs.start()
        if request.stream:
            return EventStreamResponse(self._stream(answer, outputs), outputs)
        return await self._collect(answer, outputs)

    async def _engine_prompt(
        self, prompt: str | list[int] | list[dict[str, Any]], request: CompletionRequest
    ) -> EnginePrompt:
        if self.encoder_prompts is not None:
            return await self.encoder_prompts.of_completion(prompt, request)
        truncate_to = request.truncate_prompt_tokens
        if isinstance(prompt, str):
            return await self.tokenize(prompt, request.add_special_tokens, "prompt", truncate_to)
        if isinstance(prompt[0], dict):
            raise RequestError(
                "prompt holds content parts, which this model does not take: give a text or token "
                "ids",
                param="prompt",
            )
        made = self.check_token_ids(prompt, truncate_to)
        return replace(made, text=self.tokenizer.decode(made.token_ids)) if request.echo else made

    async def _collect(self, answer: _Answer, outputs: OutputStream) -> CompletionResponse:
        finals: list[RequestOutput | None] = [None] * len(answer.prompts)
        try:
            async for index, output in outputs:
                finals[index] = output
                answer.cached_tokens[index] = output.num_cached_tokens or 0
        finally:
            await outputs.aclose()
        choices = [
            self._choice(answer, prompt_index, final, output)
            for prompt_index, final in enumerate(finals)
            if final is not None
            for output in final.outputs
        ]
        return CompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=self._usage(answer),
            kv_transfer_params=finals[0].kv_transfer_params if finals[0] is not None else None,
        )

    def _usage(self, answer: _Answer):
        cached = sum(answer.cached_tokens.values())
        return self.usage(answer.prompt_tokens, answer.completion_tokens, cached)

    def _choice(
        self, answer: _Answer, prompt_index: int, final: RequestOutput, output: CompletionOutput
    ) -> CompletionResponseChoice:
        request = answer.request
        output = _told(answer, output)
        answer.completion_tokens += len(output.token_ids)
        echoed = self._with_echo(answer, prompt_index, final, output) if request.echo else output
        index = prompt_index * request.n + output.index
        choice = CompletionResponseChoice(
            index=index,
            text=echoed.text,
            logprobs=self._logprobs(answer, index, echoed),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
        if request.return_token_ids:
            choice.token_ids = list(output.token_ids)
            choice.prompt_token_ids = answer.prompts[prompt_index].token_ids
        return choice

    def _with_echo(
        self, answer: _Answer, prompt_index: int, output: RequestOutput, piece: CompletionOutput
    ) -> CompletionOutput:
        """The (first) piece of a choice with its prompt before it."""
        prompt = answer.prompts[prompt_index]
        text = self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
        logprobs = None
        if answer.num_logprobs is not None:
            positions: list[LogprobsOnePosition | None] = [*(output.prompt_logprobs or [])]
            positions += [None] * (len(prompt.token_ids) - len(positions))
            logprobs = [*positions, *(piece.logprobs or [])]
        return replace(
            piece,
            text=text + piece.text,
            token_ids=[*prompt.token_ids, *piece.token_ids],
            logprobs=logprobs,
        )

    async def _stream(
        self, answer: _Answer, outputs: OutputStream
    ) -> AsyncIterator[CompletionStreamResponse]:
        request, options = answer.request, answer.options
        async for prompt_index, output in outputs:
            answer.cached_tokens[prompt_index] = output.num_cached_tokens or 0
            for piece in output.outputs:
                index = prompt_index * request.n + piece.index
                piece = _told(answer, piece)
                answer.completion_tokens += len(piece.token_ids)
                choice = self._stream_choice(answer, prompt_index, index, output, piece)
                if choice is not None:
                    chunk = self._chunk(answer, [choice], options.continuous_usage_stats)
                    if output.kv_transfer_params is not None:
                        chunk.kv_transfer_params = output.kv_transfer_params
                    yield chunk
        if options.include_usage:
            yield self._chunk(answer, [], True)

    def _stream_choice(
        self,
        answer: _Answer,
        prompt_index: int,
        index: int,
        output: RequestOutput,
        piece: CompletionOutput,
    ) -> CompletionResponseStreamChoice | None:
        """None: there is nothing to tell, since what there is is held back: it may become a stop
        string or a character."""
        request, is_first = answer.request, index not in answer.begun
        echoed = piece
        if request.echo and is_first:
            echoed = self._with_echo(answer, prompt_index, output, piece)
        says = echoed.text or piece.finished() or echoed.logprobs
        if not says and not (request.return_token_ids and piece.token_ids):
            return None
        answer.begun.add(index)
        choice = CompletionResponseStreamChoice(
            index=index,
            text=echoed.text,
            logprobs=self._logprobs(answer, index, echoed),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if request.return_token_ids:
            choice.token_ids = list(piece.token_ids)
            if is_first:
                choice.prompt_token_ids = answer.prompts[prompt_index].token_ids
        return choice

    def _chunk(
        self, answer: _Answer, choices: list[CompletionResponseStreamChoice], with_usage: bool
    ) -> CompletionStreamResponse:
        chunk = CompletionStreamResponse(
            id=answer.id,
            object="text_completion",
            created=answer.created,
            model=answer.model,
            choices=choices,
        )
        if with_usage:
            chunk.usage = self._usage(answer)
        elif answer.options.include_usage:
            chunk.usage = None
        return chunk

    def _logprobs(
        self, answer: _Answer, index: int, output: CompletionOutput
    ) -> CompletionLogProbs | None:
        """The logprobs of a (piece of a) choice; its offsets go on where the last piece ended."""
        wanted = answer.num_logprobs
        if wanted is None or output.logprobs is None:
            return None
        offset = answer.text_offsets.get(index, 0)
        name = self._token_name(answer)
        made = completion_logprobs(output.token_ids, output.logprobs, wanted, offset, name)
        answer.text_offsets[index] = offset + sum(map(len, made.tokens))
        return made

    def _token_name(self, answer: _Answer) -> TokenName:
        if self.shows_token_ids(answer.request):
            return id_of
        if not answer.request.echo:
            return text_of

        def name(token_id: int, entry: Logprob | None) -> str:
            # Of a prompt's first token nothing is known but its id.
            return self.tokenizer.decode([token_id]) if entry is None else text_of(token_id, entry)

        return name


def _told(answer: _Answer, output: CompletionOutput) -> CompletionOutput:
    """Without the token that the engine drew though none was wanted."""
    if not answer.request.only_echoes:
        return output
    no_logprobs = None if output.logprobs is None else []
    return replace(
        output, text="", token_ids=[], logprobs=no_logprobs, stop_reason=None,
        finish_reason="length" if output.finished() else None,
    )  # fmt: skip

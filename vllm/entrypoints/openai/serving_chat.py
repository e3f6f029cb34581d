# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import parse_chat_messages, render_prompt
from vllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from vllm.entrypoints.openai.protocol.chat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatLogProbs,
    ChatMessage,
    DeltaMessage,
)
from vllm.entrypoints.openai.protocol.common import RequestError, StreamOptions, UsageInfo
from vllm.entrypoints.openai.serving_engine import EnginePrompt, OpenAIServing
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.openai.streaming import EventStreamResponse, OutputStream, until_disconnect
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass
class _Answer:
    """What all parts of one answer share, and what was counted so far."""

    id: str
    model: str
    request: ChatCompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    begun: set[int] = field(default_factory=set)

    @property
    def usage(self) -> UsageInfo:
        return UsageInfo.of(self.prompt_tokens, self.completion_tokens)


class OpenAIServingChat(OpenAIServing):
    """Handles chat requests.

    Args:
        chat_template: takes the place of the model's own.
        response_role: who the answer is from.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        models: OpenAIServingModels,
        response_role: str = "assistant",
        *,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(engine_client, models)
        self.chat_template = chat_template
        self.response_role = response_role

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | EventStreamResponse:
        """The whole answer, or with `stream` its events.

        Raises:
            ValueError: the request cannot be served.
            ClientGone: nobody waits for the answer any more; the engine was told.
        """
        return await until_disconnect(raw_request, self._create(request, raw_request))

    async def _create(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | EventStreamResponse:
        model = self.check_request(request)
        answer = _Answer(self.request_id("chatcmpl", raw_request), model, request)
        prompt = await self._engine_prompt(request)
        answer.prompt_tokens = len(prompt.token_ids)
        param = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        max_tokens = self.max_tokens(prompt, request.wanted_tokens, param)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = self.sampling_params(request, max_tokens, logprobs)
        outputs = OutputStream([self.generate(answer.id, prompt, params, request)])
        await outputs.start()
        if request.stream:
            return EventStreamResponse(self._stream(answer, outputs), outputs)
        return await self._collect(answer, outputs)

    async def _engine_prompt(self, request: ChatCompletionRequest) -> EnginePrompt:
        tokenizer = self.tokenizer
        try:
            text = render_prompt(
                tokenizer,
                parse_chat_messages(request.messages),
                chat_template=self.chat_template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
            )
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        return await self.tokenize(text, request.add_special_tokens, "messages")

    async def _collect(self, answer: _Answer, outputs: OutputStream) -> ChatCompletionResponse:
        final: RequestOutput | None = None
        try:
            async for _, final in outputs:
                pass
        finally:
            await outputs.aclose()
        assert final is not None
        answer.completion_tokens = sum(len(output.token_ids) for output in final.outputs)
        return ChatCompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[self._choice(answer.request, output) for output in final.outputs],
            usage=answer.usage,
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
        )

    def _role(self, request: ChatCompletionRequest) -> str:
        """A continued message stays its author's."""
        last = request.messages[-1]
        return last["role"] if request.continue_final_message else self.response_role

    def _choice(
        self, request: ChatCompletionRequest, output: CompletionOutput
    ) -> ChatCompletionResponseChoice:
        return ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(role=self._role(request), content=output.text),
            logprobs=_logprobs(request, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    async def _stream(
        self, answer: _Answer, outputs: OutputStream
    ) -> AsyncIterator[ChatCompletionStreamResponse]:
        """First every choice's role, as its first output comes, then what it says."""
        options = answer.request.stream_options or StreamOptions()
        continuous = options.continuous_usage_stats
        async for _, output in outputs:
            for piece in output.outputs:
                if piece.index not in answer.begun:
                    answer.begun.add(piece.index)
                    first = DeltaMessage(role=self._role(answer.request), content="")
                    choice = ChatCompletionResponseStreamChoice(
                        index=piece.index, delta=first, logprobs=None, finish_reason=None
                    )
                    yield _chunk(answer, [choice], continuous)
                answer.completion_tokens += len(piece.token_ids)
                # Nothing to say yet: what is held back may become a stop string or a character.
                if piece.text or piece.finished() or piece.logprobs:
                    yield _chunk(answer, [_stream_choice(answer.request, piece)], continuous)
        if options.include_usage:
            yield _chunk(answer, [], True)


def _stream_choice(
    request: ChatCompletionRequest, piece: CompletionOutput
) -> ChatCompletionResponseStreamChoice:
    delta = DeltaMessage(content=piece.text) if piece.text else DeltaMessage()
    choice = ChatCompletionResponseStreamChoice(
        index=piece.index,
        delta=delta,
        logprobs=_logprobs(request, piece),
        finish_reason=piece.finish_reason,
    )
    if piece.finished():
        choice.stop_reason = piece.stop_reason
    return choice


def _chunk(
    answer: _Answer, choices: list[ChatCompletionResponseStreamChoice], with_usage: bool
) -> ChatCompletionStreamResponse:
    chunk = ChatCompletionStreamResponse(
        id=answer.id,
        object="chat.completion.chunk",
        created=answer.created,
        model=answer.model,
        choices=choices,
    )
    if with_usage:
        chunk.usage = answer.usage
    elif answer.request.stream_options is not None and answer.request.stream_options.include_usage:
        chunk.usage = None
    return chunk


def _logprobs(request: ChatCompletionRequest, output: CompletionOutput) -> ChatLogProbs | None:
    if not request.logprobs or output.logprobs is None:
        return None
    return chat_logprobs(output.token_ids, output.logprobs, request.top_logprobs or 0)

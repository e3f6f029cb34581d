# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import parse_chat_messages, render_prompt
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.logprobs import chat_logprobs, id_of, prompt_logprobs
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
from vllm.entrypoints.openai.protocol.common import RequestError, StreamOptions
from vllm.entrypoints.openai.protocol.tokenize import TokenizeRequest
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
    options: StreamOptions
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    begun: set[int] = field(default_factory=set)


class OpenAIServingChat(OpenAIServing):
    """Handles chat requests.

    Args:
        chat_template: takes the place of the model's own.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        models: OpenAIServingModels,
        args: FrontendArgs | None = None,
        *,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(engine_client, models, args)
        self.chat_template = chat_template

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
        request_id = self.request_id("chatcmpl", raw_request, request)
        answer = _Answer(request_id, model, request, self.stream_options(request))
        prompt = await self._engine_prompt(request)
        answer.prompt_token_ids, answer.prompt_tokens = prompt.token_ids, prompt.num_tokens
        param = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        max_tokens = self.max_tokens(prompt, request.wanted_tokens, param)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = self.sampling_params(request, prompt, max_tokens, logprobs)
        outputs = OutputStream([self.generate(answer.id, prompt, params, request)])
        await outputs.start()
        if request.stream:
            return EventStreamResponse(self._stream(answer, outputs), outputs)
        return await self._collect(answer, outputs)

    async def _engine_prompt(self, request: ChatCompletionRequest) -> EnginePrompt:
        if self.encoder_prompts is not None:
            return await self.encoder_prompts.of_chat(
                request.messages, request, self.tokenizer, **self._template_options(request)
            )
        return await self.tokenize(
            self.render(request),
            request.add_special_tokens,
            "messages",
            request.truncate_prompt_tokens,
        )

    def render(self, request: ChatCompletionRequest | TokenizeRequest) -> str:
        """The text that the template makes of the conversation.

        Raises:
            RequestError: it makes none of it, or the request brings a template of its own and the
                server does not trust it.
        """
        options = self._template_options(request)
        try:
            conversation = parse_chat_messages(request.messages or [])
            return render_prompt(self.tokenizer, conversation, **options)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error

    def _template_options(self, request: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
        """What `render_prompt` is told besides the conversation.

        Raises:
            RequestError: the request brings a template and the server does not trust it.
        """
        if request.chat_template is not None and not self.args.trust_request_chat_template:
            raise RequestError(
                "chat_template is code, and this server runs none that requests bring: start it "
                "with --trust-request-chat-template, or leave the field out",
                param="chat_template",
            )
        kwargs = request.chat_template_kwargs or {}
        return dict(
            chat_template=request.chat_template or self.chat_template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs={**self.args.default_chat_template_kwargs, **kwargs},
        )

    async def _collect(self, answer: _Answer, outputs: OutputStream) -> ChatCompletionResponse:
        final: RequestOutput | None = None
        try:
            async for _, final in outputs:
                pass
        finally:
            await outputs.aclose()
        assert final is not None
        answer.completion_tokens = sum(len(output.token_ids) for output in final.outputs)
        answer.cached_tokens = final.num_cached_tokens or 0
        return ChatCompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[self._choice(answer.request, output) for output in final.outputs],
            usage=self._usage(answer),
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
            prompt_token_ids=answer.prompt_token_ids if answer.request.return_token_ids else None,
            kv_transfer_params=final.kv_transfer_params,
        )

    def _usage(self, answer: _Answer):
        return self.usage(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)

    def _role(self, request: ChatCompletionRequest) -> str:
        """A continued message stays its author's."""
        last = request.messages[-1]
        return last["role"] if request.continue_final_message else self.args.response_role

    def _echoed_text(self, request: ChatCompletionRequest) -> str:
        """With `echo`: the last message, if the answer goes on with it or has the same role."""
        if not request.echo:
            return ""
        last = parse_chat_messages(request.messages)[-1]
        return last["content"] if last["role"] == self._role(request) else ""

    def _choice(
        self, request: ChatCompletionRequest, output: CompletionOutput
    ) -> ChatCompletionResponseChoice:
        text = self._echoed_text(request) + output.text
        return ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(role=self._role(request), content=text),
            logprobs=self._logprobs(request, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else None,
        )

    async def _stream(
        self, answer: _Answer, outputs: OutputStream
    ) -> AsyncIterator[ChatCompletionStreamResponse]:
        """First every choice's role, as its first output comes, then what it says."""
        request, options = answer.request, answer.options
        continuous = options.continuous_usage_stats
        async for _, output in outputs:
            answer.cached_tokens = output.num_cached_tokens or 0
            for piece in output.outputs:
                if piece.index not in answer.begun:
                    yield self._first_chunk(answer, piece.index)
                    answer.begun.add(piece.index)
                answer.completion_tokens += len(piece.token_ids)
                says = piece.text or piece.finished() or piece.logprobs
                # Nothing to say yet: what is held back may become a stop string or a character.
                if says or (request.return_token_ids and piece.token_ids):
                    choice = self._stream_choice(request, piece)
                    chunk = self._chunk(answer, [choice], continuous)
                    if output.kv_transfer_params is not None:
                        chunk.kv_transfer_params = output.kv_transfer_params
                    yield chunk
        if options.include_usage:
            yield self._chunk(answer, [], True)

    def _first_chunk(self, answer: _Answer, index: int) -> ChatCompletionStreamResponse:
        """The role, and what is echoed."""
        delta = DeltaMessage(
            role=self._role(answer.request), content=self._echoed_text(answer.request)
        )
        choice = ChatCompletionResponseStreamChoice(
            index=index, delta=delta, logprobs=None, finish_reason=None
        )
        chunk = self._chunk(answer, [choice], answer.options.continuous_usage_stats)
        if answer.request.return_token_ids and not answer.begun:
            chunk.prompt_token_ids = answer.prompt_token_ids
        return chunk

    def _stream_choice(
        self, request: ChatCompletionRequest, piece: CompletionOutput
    ) -> ChatCompletionResponseStreamChoice:
        delta = DeltaMessage(content=piece.text) if piece.text else DeltaMessage()
        choice = ChatCompletionResponseStreamChoice(
            index=piece.index,
            delta=delta,
            logprobs=self._logprobs(request, piece),
            finish_reason=piece.finish_reason,
        )
        if piece.finished():
            choice.stop_reason = piece.stop_reason
        if request.return_token_ids:
            choice.token_ids = list(piece.token_ids)
        return choice

    def _chunk(
        self,
        answer: _Answer,
        choices: list[ChatCompletionResponseStreamChoice],
        with_usage: bool,
    ) -> ChatCompletionStreamResponse:
        chunk = ChatCompletionStreamResponse(
            id=answer.id,
            object="chat.completion.chunk",
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
        self, request: ChatCompletionRequest, output: CompletionOutput
    ) -> ChatLogProbs | None:
        named = request.logprob_token_ids
        if output.logprobs is None or not (request.logprobs or named):
            return None
        wanted = (request.top_logprobs or 0) if named is None else len(named)
        name = id_of if self.shows_token_ids(request) else None
        return chat_logprobs(output.token_ids, output.logprobs, wanted, name)

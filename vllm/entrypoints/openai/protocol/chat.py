# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    Int32,
    Int64,
    RequestError,
    Text,
    UsageInfo,
)


class ChatCompletionRequest(GenerationRequest):
    """A conversation, to be answered."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.REFUSED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "web_search_options": (),
        "documents": ([],),
        "media_io_kwargs": ({},),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_options(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false",
                param="continue_final_message",
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to generate; `max_completion_tokens` is the newer name and counts."""
        newer = self.max_completion_tokens
        return newer if newer is not None else self.max_tokens


class TopLogprob(BaseModel):
    """A token that was likely at a position; `bytes` are its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The token that was taken, and the likeliest ones beside it."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogProbs(BaseModel):
    """An entry for each token of the message."""

    content: list[TokenLogprob] | None = None


class ChatMessage(BaseModel):
    """What the model said."""

    role: str
    content: str | None = None
    refusal: str | None = None


class ChatCompletionResponseChoice(BaseModel):
    """One answer. `stop_reason`: the stop string or stop token id, None for others."""

    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """The answer to a request without `stream`."""

    id: str
    object: str = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatCompletionResponseChoice]
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class DeltaMessage(BaseModel):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChatCompletionResponseStreamChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(BaseModel):
    """A chunk of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None

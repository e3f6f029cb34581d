# SPDX-License-Identifier: Apache-2.0
"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from vllm.entrypoints.openai.protocol.common import (
    Int64,
    RequestError,
    RequestFields,
    Text,
)


class TokenizeRequest(RequestFields):
    """A text (`prompt`) or a conversation (`messages`). `add_special_tokens` left out: for a text
    yes, for a conversation no, since the template writes them."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
    }

    model: str | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give prompt or messages, one of them", param="prompt")
        if self.messages and self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false",
                param="continue_final_message",
            )
        return self


class TokenizeResponse(BaseModel):
    """`token_strs`: the vocabulary's own spelling of each token, where it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestFields):
    """Token ids."""

    model: str | None = None
    tokens: list[Int64]


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str

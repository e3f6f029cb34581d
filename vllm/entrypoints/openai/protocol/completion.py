# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, WithJsonSchema, field_validator, model_validator

from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    Int32,
    Int64,
    RequestError,
    UsageInfo,
    valid_text,
)

Prompt = str | list[str] | list[int] | list[list[int]] | list[dict[str, Any]]
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
        # One prompt in content parts, as a chat message has them.
        {"type": "array", "items": {"type": "object"}},
    ]
}


class CompletionRequest(GenerationRequest):
    """A text, token ids, or several of either, to be continued; or, for a model that reads images,
    one prompt in content parts."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.REFUSED,
        "suffix": ("",),
        "prompt_embeds": (),
    }

    # Checked below rather than by pydantic, which would try four types on each of a million ids.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Int64 | None = 16
    logprobs: Int32 | None = None
    add_special_tokens: bool = True

    def _wanted_prompt_logprobs(self, logprobs: int | None) -> int | None:
        """With `echo`, logprobs are asked of the prompt as well."""
        if self.prompt_logprobs is None and self.echo:
            return logprobs
        return self.prompt_logprobs

    @property
    def only_echoes(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return self.echo and self.max_tokens == 0

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Prompt:
        if isinstance(prompt, str):
            return _text(prompt)
        if not isinstance(prompt, list):
            raise RequestError(
                "prompt must be a text, a list of texts, token ids, or a list of token id lists",
                param="prompt",
            )
        if not prompt:
            raise RequestError("prompt is empty: it holds no text and no token ids", param="prompt")
        if isinstance(prompt[0], str):
            return [_text(item) for item in prompt]
        if isinstance(prompt[0], dict):
            return _parts(prompt)
        if isinstance(prompt[0], list):
            return [_token_ids(item) for item in prompt]
        return _token_ids(prompt)

    @model_validator(mode="after")
    def _check_kv_transfer(self) -> CompletionRequest:
        if self.kv_transfer_params is not None and len(self.prompts) > 1:
            raise RequestError(
                f"kv_transfer_params go with one prompt, and there are {len(self.prompts)}: send "
                "each in a request of its own",
                param="kv_transfer_params",
            )
        return self

    @property
    def prompts(self) -> list[str | list[int] | list[dict[str, Any]]]:
        """The prompts one by one."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], (int, dict))
        return [self.prompt] if one else self.prompt


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise RequestError(
            f"prompt mixes texts with {type(item).__name__}; a list must hold one kind",
            param="prompt",
        )
    return valid_text(item)


def _token_ids(item: Any) -> list[int]:
    # `type(...) is int` and not isinstance: true is no token id.
    if not isinstance(item, list) or not all(type(token) is int for token in item):
        raise RequestError("prompt must hold token ids only, or texts only", param="prompt")
    if not item:
        raise RequestError("prompt holds an empty list of token ids", param="prompt")
    return item


def _parts(items: list[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(item, dict) for item in items):
        raise RequestError(
            "prompt mixes content parts with others; a list must hold one kind", param="prompt"
        )
    for item in items:
        if isinstance(item.get("text"), str):
            valid_text(item["text"])
    return items


class CompletionLogProbs(BaseModel):
    """Lists with an entry for each token of the completion."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class CompletionResponseChoice(BaseModel):
    """One completion. `stop_reason`: the stop string or stop token id, None for others. The token
    ids are told with `return_token_ids`."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class CompletionResponse(BaseModel):
    """The answer to a request without `stream`."""

    id: str
    object: str = "text_completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[CompletionResponseChoice]
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None


class CompletionResponseStreamChoice(BaseModel):
    """A piece of one completion."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionStreamResponse(BaseModel):
    """A chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None

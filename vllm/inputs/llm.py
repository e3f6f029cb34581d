# SPDX-License-Identifier: Apache-2.0
"""What a user may hand in as a prompt."""

from __future__ import annotations

from typing import NotRequired, TypeAlias, TypedDict


class _PromptOptions(TypedDict):
    cache_salt: NotRequired[str]
    """Prefixes are shared only among requests with the same salt."""


class TextPrompt(_PromptOptions):
    """A text, to be tokenised."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids; `prompt` is their text, for the record only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


DecoderOnlyPrompt: TypeAlias = str | TextPrompt | list[int] | TokensPrompt
SingletonPrompt: TypeAlias = DecoderOnlyPrompt
PromptType: TypeAlias = DecoderOnlyPrompt

# SPDX-License-Identifier: Apache-2.0
"""What the rest of the code expects of a tokenizer: Hugging Face's names, this project's or
Transformers' class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable


@runtime_checkable
class TokenizerLike(Protocol):
    """Text to ids and back. Every member means what it means on Transformers' fast tokenizers."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def is_fast(self) -> bool:
        """Whether there is a `tokenizers.Tokenizer` behind it, reachable as `backend_tokenizer`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones; `len()` counts those too."""
        ...

    def __len__(self) -> int: ...

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str: ...

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...

    def convert_ids_to_tokens(
        self, ids: Sequence[int], skip_special_tokens: bool = False
    ) -> list[str | None]: ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str | list[int]: ...

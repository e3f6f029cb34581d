# SPDX-License-Identifier: Apache-2.0
"""A thin tokenizer over `tokenizers.Tokenizer`: Transformers' interface in 0.1 s and without
torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from vllm.tokenizers.chat_template import render_chat_template

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerSettings:
    """What `tokenizer_config.json` adds to `tokenizer.json`, checked and with plain types."""

    special_tokens: dict[str, str] = field(
        default_factory=dict
    )  # bos_token, eos_token, ... -> text
    extra_special_tokens: tuple[str, ...] = ()
    chat_template: str | dict[str, str] | None = None
    # None: as tokenizer.json's post-processor says.
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    model_max_length: int | None = None

    @property
    def fixes_post_processor(self) -> bool:
        return self.add_bos_token is not None or self.add_eos_token is not None


class FastTokenizer:
    """Implements `TokenizerLike`. `backend_tokenizer` is the `tokenizers.Tokenizer` itself."""

    is_fast = True

    def __init__(
        self, backend: Tokenizer, settings: TokenizerSettings, name_or_path: str = ""
    ) -> None:
        self.backend_tokenizer = backend
        self.settings = settings
        self.name_or_path = name_or_path
        self.chat_template = settings.chat_template
        backend.no_truncation()
        backend.no_padding()
        self._register_special_tokens()
        if settings.fixes_post_processor or backend.post_processor is None:
            backend.post_processor = self._template_processor()
        # Both are asked for every request; counting again means building Python dicts of the
        # vocabulary.
        self._num_tokens = backend.get_vocab_size(with_added_tokens=True)
        self._vocab_size = backend.get_vocab_size(with_added_tokens=False)

    # -- special tokens
    # ------------------------------------------------------------------------------

    def _register_special_tokens(self) -> None:
        added = self.backend_tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        wanted = [*self.settings.special_tokens.values(), *self.settings.extra_special_tokens]
        missing = [text for text in dict.fromkeys(wanted) if text not in special]
        if missing:
            self.backend_tokenizer.add_special_tokens(
                [AddedToken(text, special=True, normalized=False) for text in missing]
            )

    def _template_processor(self) -> TemplateProcessing:
        bos = self.bos_token if self.settings.add_bos_token else None
        eos = self.eos_token if self.settings.add_eos_token else None
        single = " ".join(filter(None, (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0")))
        pair = " ".join(filter(None, (single, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1")))
        named = [
            (text, self.convert_tokens_to_ids(text))
            for text in dict.fromkeys(filter(None, (bos, eos)))
        ]
        return TemplateProcessing(single=single, pair=pair, special_tokens=named)

    def _special_id(self, name: str) -> int | None:
        text = self.settings.special_tokens.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    @property
    def bos_token(self) -> str | None:
        return self.settings.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.settings.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.settings.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.settings.special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {
            name: self.settings.special_tokens[name]
            for name in _NAMED
            if name in self.settings.special_tokens
        }

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The named special tokens, then every added token that is marked special, each once."""
        marked = (
            token.content
            for token in self.backend_tokenizer.get_added_tokens_decoder().values()
            if token.special
        )
        return list(dict.fromkeys([*self.special_tokens_map.values(), *marked]))

    @cached_property
    def all_special_ids(self) -> list[int]:
        ids = (self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    # -- vocabulary
    # ----------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def model_max_length(self) -> int | None:
        return self.settings.model_max_length

    def __len__(self) -> int:
        return self._num_tokens

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in sorted(added.items())}

    @cached_property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values(), default=-1)

    # -- text to ids
    # ---------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Token ids of a text. `max_length` cuts the end off only where `truncation` is not
        False."""
        ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if max_length is None or truncation is False or len(ids) <= max_length:
            return ids
        return self._encode_truncated(text, add_special_tokens, max_length)

    def _encode_truncated(self, text: str, add_special_tokens: bool, max_length: int) -> list[int]:
        """Cut the text's own tokens, so that special tokens at the end stay (as Transformers
        does)."""
        num_special = (
            self.backend_tokenizer.num_special_tokens_to_add(is_pair=False)
            if add_special_tokens
            else 0
        )
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=False)
        encoding.truncate(max(max_length - num_special, 0))
        return self.backend_tokenizer.post_process(
            encoding, add_special_tokens=add_special_tokens
        ).ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of many texts, worked out side by side."""
        encodings = self.backend_tokenizer.encode_batch(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        padding: bool | str = False,
        return_tensors: str | None = None,
    ) -> Mapping[str, Any]:
        """`input_ids` and `attention_mask` of one text (lists of int) or of several (lists of
        lists).

        Args:
            padding: with the padding token behind, as long as the longest text.
            return_tensors: "pt" or "np": (texts, num_tokens) each, in Transformers' BatchEncoding.

        Raises:
            ValueError: there is no padding token.
        """
        texts = [text] if isinstance(text, str) else list(text)
        limit = max_length if truncation else None
        ids = [self.encode(item, add_special_tokens, max_length=limit) for item in texts]
        masks = [[1] * len(item) for item in ids]
        if padding not in (False, "do_not_pad"):
            ids, masks = self._padded(ids, masks)
        if return_tensors is not None:
            from transformers import BatchEncoding

            encoded = {"input_ids": ids, "attention_mask": masks}
            return BatchEncoding(encoded, tensor_type=return_tensors)
        if isinstance(text, str):
            return {"input_ids": ids[0], "attention_mask": masks[0]}
        return {"input_ids": ids, "attention_mask": masks}

    def _padded(
        self, ids: list[list[int]], masks: list[list[int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        if self.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token")
        longest = max(map(len, ids))
        fill = [longest - len(item) for item in ids]
        return (
            [item + [self.pad_token_id] * n for item, n in zip(ids, fill, strict=True)],
            [mask + [0] * n for mask, n in zip(masks, fill, strict=True)],
        )

    # -- ids to text
    # ---------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """Ids of tokens; the unknown token's (None where there is none) for those not in the
        vocabulary."""
        if isinstance(tokens, str):
            token_id = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: Sequence[int] | int, skip_special_tokens: bool = False
    ) -> list[str | None] | str | None:
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        special = set(self.all_special_ids) if skip_special_tokens else ()
        return [
            self.backend_tokenizer.id_to_token(int(token_id))
            for token_id in ids
            if token_id not in special
        ]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        decoder = self.backend_tokenizer.decoder
        return decoder.decode(tokens) if decoder is not None else " ".join(tokens)

    # -- chat
    # ----------------------------------------------------------------------------------------

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The template to render with: `chat_template` (text, or the name of one of several), or
        the model's.

        Raises ValueError where there is none.
        """
        own = self.chat_template
        if not isinstance(own, dict):
            template = chat_template if chat_template is not None else own
            if template is None:
                raise ValueError("the model has no chat template; pass one with --chat-template")
            return template
        if chat_template is not None:
            return own.get(chat_template, chat_template)
        for name in ("tool_use", "default") if tools else ("default",):
            if name in own:
                return own[name]
        raise ValueError(
            f"the model has several chat templates and none is 'default'; name one of {sorted(own)}"
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int] | dict[str, Any]:
        """The prompt of a conversation, as text (`tokenize=False`) or ids without further special
        tokens; with `return_dict` (Transformers' default, not this one's) as `__call__` gives them.

        Raises ValueError when there is no template or it fails on these messages.
        """
        text = render_chat_template(
            conversation,
            self.get_chat_template(chat_template, tools),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **template_kwargs},
        )
        if not tokenize:
            return text
        return self(text, add_special_tokens=False) if return_dict else self.encode(text, False)

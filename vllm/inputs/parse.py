# SPDX-License-Identifier: Apache-2.0
"""Users' prompts, in whatever form, to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm.inputs.llm import MultiModalDataDict, PromptType

if TYPE_CHECKING:
    from vllm.inputs.engine import EncoderDecoderInput

_PROMPT_KEYS = (
    "prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs",
    "multi_modal_uuids",
)  # fmt: skip
_PAIR_KEYS = ("encoder_prompt", "decoder_prompt")
_PROCESSED = "enc_dec"


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt in one form: `text` or `token_ids` or both; with both, the ids count."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    mm_data: MultiModalDataDict = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mm_uuids: Mapping[str, Sequence[str | None] | str] = field(default_factory=dict)

    @property
    def content(self) -> str | list[int]:
        """The ids, or else the text."""
        if self.token_ids is not None:
            return self.token_ids
        return self.text or ""

    @property
    def has_mm_data(self) -> bool:
        """Whether there is anything for an encoder, besides the prompt itself."""
        return any(data is not None for data in self.mm_data.values())


@dataclass(frozen=True)
class ParsedEncoderDecoderPrompt:
    """A prompt in two parts. `decoder` None: as the model's config says."""

    encoder: ParsedPrompt
    decoder: ParsedPrompt | None


def check_unicode(text: str, what: str) -> None:
    """
    Raises:
        ValueError: `text` holds half of a surrogate pair, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start].encode("unicode_escape").decode()
        raise ValueError(
            f"{what} is not valid Unicode: {character} at character {error.start} is half of a "
            "surrogate pair"
        ) from None


def parse_prompt(prompt: PromptType) -> ParsedPrompt:
    """A prompt in any of the forms that stand for one.

    Raises:
        ValueError: it is in none of them; says which there are.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, list):
        return ParsedPrompt(None, prompt)
    if not isinstance(prompt, Mapping):
        raise ValueError(
            f"a prompt must be a string, a list of token ids, or a dict with `prompt` or "
            f"`prompt_token_ids`, not {type(prompt).__name__}"
        )
    _check_keys(prompt, _PROMPT_KEYS)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise ValueError("a prompt dict needs `prompt` or `prompt_token_ids`")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"`prompt` must be a string, not {type(text).__name__}")
    check_unicode(text or "", "`prompt`")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError("cache_salt must be a non-empty string")
    check_unicode(salt or "", "cache_salt")
    return ParsedPrompt(
        text,
        token_ids,
        salt,
        mm_data=_mapping(prompt, "multi_modal_data"),
        mm_processor_kwargs=_mapping(prompt, "mm_processor_kwargs"),
        mm_uuids=_mapping(prompt, "multi_modal_uuids"),
    )


def is_processed(prompt: object) -> TypeGuard[EncoderDecoderInput]:
    """Whether it is what a processor made of a prompt."""
    return isinstance(prompt, Mapping) and prompt.get("type") == _PROCESSED


def is_encoder_decoder_prompt(prompt: object) -> bool:
    """Whether it is a dict of an encoder's and a decoder's prompt."""
    return isinstance(prompt, Mapping) and any(key in prompt for key in _PAIR_KEYS)


def parse_encoder_decoder_prompt(
    prompt: PromptType,
) -> ParsedPrompt | ParsedEncoderDecoderPrompt:
    """A prompt of an encoder-decoder model: in two parts, or one that stands for both.

    Raises:
        ValueError: it is in no form that there is.
    """
    if not is_encoder_decoder_prompt(prompt):
        return parse_prompt(prompt)
    _check_keys(prompt, _PAIR_KEYS)
    if prompt.get("encoder_prompt") is None:
        raise ValueError("an encoder_prompt must come with the decoder_prompt")
    try:
        part = "encoder_prompt"
        encoder = parse_prompt(prompt[part])
        part = "decoder_prompt"
        given = prompt.get(part)
        decoder = None if given is None else parse_prompt(given)
    except ValueError as error:
        raise ValueError(f"{part}: {error}") from None
    if decoder is not None and decoder.has_mm_data:
        raise ValueError("decoder_prompt: multi_modal_data belong to the encoder_prompt")
    return ParsedEncoderDecoderPrompt(encoder, decoder)


def parse_decoder_only_prompt(prompt: PromptType) -> ParsedPrompt:
    """A prompt of a model without an encoder.

    Raises:
        ValueError: it is in no form that there is, or has something for an encoder.
    """
    if is_encoder_decoder_prompt(prompt):
        raise ValueError("encoder_prompt and decoder_prompt are for encoder-decoder models only")
    parsed = parse_prompt(prompt)
    if parsed.has_mm_data:
        raise ValueError(
            f"multi_modal_data ({', '.join(parsed.mm_data)}) are not supported by this model: it "
            "takes text only"
        )
    return parsed


def _check_keys(prompt: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(str(key) for key in prompt if key not in known)
    if unknown:
        raise ValueError(
            f"prompt keys {', '.join(map(repr, unknown))} are not supported; supported: "
            f"{', '.join(known)}"
        )


def _mapping(prompt: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = prompt.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"`{key}` must be a dict, not {type(value).__name__}")
    return value

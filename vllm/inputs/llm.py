# SPDX-License-Identifier: Apache-2.0
"""What a user may hand in as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict, TypeVar, final

if TYPE_CHECKING:
    from vllm.multimodal.inputs import ImageItem

_T = TypeVar("_T")

ModalityData: TypeAlias = _T | list[_T | None] | None
"""One item, or a list of them."""


@final
class MultiModalDataBuiltins(TypedDict, total=False):
    """The modalities of the models here."""

    image: ModalityData[ImageItem]
    """For models that read images."""
    text: ModalityData[str | list[int]]
    """For models with a text encoder: texts, or their token ids."""


MultiModalDataDict: TypeAlias = Mapping[str, ModalityData[Any]]
"""The encoder's inputs by modality, such as {"image": image} or {"text": "..."}."""

MultiModalUUIDDict: TypeAlias = Mapping[str, Sequence[str | None] | str]
"""A user's own identifiers of the encoder's inputs, by modality."""


class _PromptOptions(TypedDict):
    cache_salt: NotRequired[str]
    """Prefixes are shared only among requests with the same salt."""
    multi_modal_data: NotRequired[MultiModalDataDict | None]
    """What the encoder gets."""
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    """Arguments of the model's processor."""
    multi_modal_uuids: NotRequired[MultiModalUUIDDict]
    """Identifiers to know the encoder's inputs by, in place of a hash of their content."""


class TextPrompt(_PromptOptions):
    """A text, to be tokenised."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids; `prompt` is their text, for the record only."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


DecoderOnlyPrompt: TypeAlias = str | TextPrompt | list[int] | TokensPrompt
EncoderPrompt: TypeAlias = str | TextPrompt | list[int] | TokensPrompt
DecoderPrompt: TypeAlias = str | TextPrompt | list[int] | TokensPrompt


class ExplicitEncoderDecoderPrompt(TypedDict):
    """What the encoder gets, and how the decoder begins. None: as the model's own config says."""

    encoder_prompt: EncoderPrompt
    decoder_prompt: DecoderPrompt | None


EncoderDecoderPrompt: TypeAlias = EncoderPrompt | ExplicitEncoderDecoderPrompt
SingletonPrompt: TypeAlias = DecoderOnlyPrompt | EncoderPrompt | DecoderPrompt
PromptType: TypeAlias = DecoderOnlyPrompt | EncoderDecoderPrompt

# SPDX-License-Identifier: Apache-2.0
"""Prompts as processors leave them: token ids, and what the encoder gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsOptionalItems, PlaceholderRange


class _InputOptions(TypedDict):
    arrival_time: NotRequired[float]
    cache_salt: NotRequired[str]


class TokensInput(_InputOptions):
    """Token ids alone."""

    type: Literal["token"]
    prompt_token_ids: list[int]
    prompt: NotRequired[str]


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> TokensInput:
    """Puts a `TokensInput` together."""
    inputs = TokensInput(type="token", prompt_token_ids=prompt_token_ids)
    if prompt is not None:
        inputs["prompt"] = prompt
    if cache_salt is not None:
        inputs["cache_salt"] = cache_salt
    return inputs


MultiModalHashes: TypeAlias = Mapping[str, list[str]]
"""A hash for each item, by modality."""
MultiModalPlaceholders: TypeAlias = Mapping[str, Sequence["PlaceholderRange"]]
"""Where each item stands in the token ids, by modality."""


class MultiModalInput(_InputOptions):
    """Token ids with items that belong to placeholders among them."""

    type: Literal["multimodal"]
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    mm_kwargs: MultiModalKwargsOptionalItems
    mm_hashes: MultiModalHashes
    mm_placeholders: MultiModalPlaceholders


def mm_input(
    prompt_token_ids: list[int],
    mm_kwargs: MultiModalKwargsOptionalItems,
    mm_hashes: MultiModalHashes,
    mm_placeholders: MultiModalPlaceholders,
    *,
    prompt: str | None = None,
    cache_salt: str | None = None,
) -> MultiModalInput:
    """Puts a `MultiModalInput` together."""
    inputs = MultiModalInput(
        type="multimodal",
        prompt_token_ids=prompt_token_ids,
        mm_kwargs=mm_kwargs,
        mm_hashes=mm_hashes,
        mm_placeholders=mm_placeholders,
    )
    if prompt is not None:
        inputs["prompt"] = prompt
    if cache_salt is not None:
        inputs["cache_salt"] = cache_salt
    return inputs


class MultiModalEncDecInput(MultiModalInput):
    """The placeholders are among `encoder_prompt_token_ids`; `prompt_token_ids` are the decoder's."""

    encoder_prompt_token_ids: list[int]
    encoder_prompt: NotRequired[str]


def mm_enc_dec_input(
    encoder_inputs: MultiModalInput,
    decoder_prompt_token_ids: list[int],
    *,
    decoder_prompt: str | None = None,
) -> MultiModalEncDecInput:
    """The encoder's input together with the decoder's prompt."""
    inputs = MultiModalEncDecInput(
        type="multimodal",
        prompt_token_ids=decoder_prompt_token_ids,
        encoder_prompt_token_ids=encoder_inputs["prompt_token_ids"],
        mm_kwargs=encoder_inputs["mm_kwargs"],
        mm_hashes=encoder_inputs["mm_hashes"],
        mm_placeholders=encoder_inputs["mm_placeholders"],
    )
    if decoder_prompt is not None:
        inputs["prompt"] = decoder_prompt
    if "prompt" in encoder_inputs:
        inputs["encoder_prompt"] = encoder_inputs["prompt"]
    if "cache_salt" in encoder_inputs:
        inputs["cache_salt"] = encoder_inputs["cache_salt"]
    return inputs


DecoderOnlyEngineInput: TypeAlias = TokensInput | MultiModalInput
EncoderInput: TypeAlias = TokensInput | MultiModalEncDecInput
DecoderEngineInput: TypeAlias = TokensInput | MultiModalInput


class EncoderDecoderInput(TypedDict):
    """What the encoder gets, and the decoder's prompt, complete."""

    type: Literal["enc_dec"]
    encoder_prompt: EncoderInput
    decoder_prompt: DecoderEngineInput
    arrival_time: NotRequired[float]


SingletonInput: TypeAlias = DecoderOnlyEngineInput | MultiModalEncDecInput
EngineInput: TypeAlias = DecoderOnlyEngineInput | EncoderDecoderInput


def build_enc_dec_input(
    encoder_input: SingletonInput,
    decoder_input: SingletonInput | None,
    decoder_start_token_id: int,
    skip_decoder_start_token: bool = False,
) -> EncoderDecoderInput:
    """The decoder's prompt put behind its start token, unless it begins with it.

    Args:
        decoder_input: None: the prompt that the processor made for the decoder (empty where the
            encoder's input is tokens alone: those are never the decoder's).
        skip_decoder_start_token: leave the decoder's prompt as it is.

    Raises:
        ValueError: the decoder's prompt has items of its own.
    """
    if decoder_input is not None and decoder_input["type"] != "token":
        raise ValueError("a decoder prompt cannot have multi_modal_data: the encoder takes them")
    source = decoder_input if decoder_input is not None else encoder_input
    is_decoders = decoder_input is not None or "encoder_prompt_token_ids" in encoder_input
    token_ids = list(source["prompt_token_ids"]) if is_decoders else []
    if not skip_decoder_start_token and token_ids[:1] != [decoder_start_token_id]:
        token_ids = [decoder_start_token_id, *token_ids]
    decoder = tokens_input(
        token_ids,
        prompt=source.get("prompt") if is_decoders else None,
        cache_salt=encoder_input.get("cache_salt") or source.get("cache_salt"),
    )
    return EncoderDecoderInput(type="enc_dec", encoder_prompt=encoder_input, decoder_prompt=decoder)


def split_enc_dec_input(inputs: EngineInput) -> tuple[SingletonInput | None, SingletonInput]:
    """(the encoder's input, the decoder's prompt); of a decoder-only model (None, all of it)."""
    if inputs["type"] == "enc_dec":
        return inputs["encoder_prompt"], inputs["decoder_prompt"]
    return None, inputs

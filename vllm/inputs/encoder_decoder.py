# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoder-decoder models.

A prompt may come in one part or in two. In one part it is the encoder's text where the encoder
reads text and nothing else is given for it; else it is the decoder's. However it comes, the decoder
starts as Transformers' `generate` would: with the start token, and with the forced BOS token behind
it where nothing else is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.inputs.engine import (
    EncoderDecoderInput,
    MultiModalEncDecInput,
    TokensInput,
    build_enc_dec_input,
    tokens_input,
)
from vllm.inputs.parse import ParsedEncoderDecoderPrompt, ParsedPrompt
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataItems, parse_mm_uuids
from vllm.multimodal.processing import EncDecMultiModalProcessor, ProcessorInputs, TimingContext

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.tokenizers import TokenizerLike

logger = init_logger(__name__)

TEXT = "text"


class EncoderDecoderPreprocessor:
    """Makes encoder inputs and decoder prompts for one model. Thread-safe."""

    def __init__(self, model_config: ModelConfig, tokenizer: TokenizerLike | None) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self._processor: EncDecMultiModalProcessor | None = None
        self._lock = threading.Lock()

    @property
    def processor(self) -> EncDecMultiModalProcessor:
        """The model's processor; made, and the model's class imported, on first use.

        Raises:
            ValueError: the model's class has none.
        """
        with self._lock:
            if self._processor is None:
                # Here, since two threads that import it first, at once, break each other: one of
                # them gets the package as it was before it has put its lazy self in its place.
                import transformers  # noqa: F401

                made = MULTIMODAL_REGISTRY.create_processor(
                    self.model_config, tokenizer=self.tokenizer
                )
                if not isinstance(made, EncDecMultiModalProcessor):
                    raise ValueError(
                        f"{type(made).__name__} is no EncDecMultiModalProcessor, as the model "
                        f"{self.model_config.model} needs"
                    )
                self._processor = made
            return self._processor

    def prepare_in_background(self) -> None:
        """Makes the processor in a thread, so that the first prompt need not wait for imports. What
        is wrong with it is told to the first prompt."""

        def prepare() -> None:
            try:
                self.processor  # noqa: B018 - makes it
            except Exception as error:
                logger.warning("the model's processor cannot be made: %s", error)

        threading.Thread(target=prepare, name="processor", daemon=True).start()

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the encoder reads: "text", "image"."""
        return tuple(self.processor.info.supported_mm_limits)

    def max_items(self, modality: str) -> int:
        """The most items of a modality in a prompt."""
        return self.processor.info.allowed_mm_limits.get(modality, 0)

    @cached_property
    def decoder_start_token_id(self) -> int:
        """The token that a decoder's prompt begins with.

        Raises:
            ValueError: no config names one.
        """
        wanted = self._token_of_config("decoder_start_token_id")
        wanted = self._token_of_config("bos_token_id") if wanted is None else wanted
        if wanted is None:
            raise ValueError(
                "neither generation_config.json nor config.json names a decoder_start_token_id; "
                'pass --override-generation-config \'{"decoder_start_token_id": ID}\''
            )
        return wanted

    @cached_property
    def forced_bos_token_id(self) -> int | None:
        """The token that comes behind the start token, if the generation config forces one."""
        return self._generation_config.get("forced_bos_token_id")

    @cached_property
    def _generation_config(self) -> Mapping[str, Any]:
        config = self.model_config
        return {**config.try_get_generation_config(), **config.override_generation_config}

    def _token_of_config(self, name: str) -> int | None:
        places = (
            self._generation_config,
            self.model_config.hf_config_dict,
            self.model_config.hf_text_config_dict,
            self.model_config.hf_config_dict.get("decoder") or {},
        )
        return next((place[name] for place in places if place.get(name) is not None), None)

    def process(
        self,
        prompt: ParsedPrompt | ParsedEncoderDecoderPrompt,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> EncoderDecoderInput:
        """The encoder's input and the decoder's complete prompt.

        Args:
            tokenization_kwargs: of the encoder's text.

        Raises:
            ValueError: what is wrong with the prompt.
        """
        is_pair = isinstance(prompt, ParsedEncoderDecoderPrompt)
        encoder = prompt.encoder if is_pair else prompt
        mm_data, content = self._encoder_data(encoder)
        items = self._parse_items(mm_data)
        inputs = ProcessorInputs(
            content,
            items,
            parse_mm_uuids(encoder.mm_uuids) or None,
            encoder.mm_processor_kwargs,
            tokenization_kwargs or {},
        )
        processed = self.processor.apply(inputs, TimingContext(enabled=False))
        decoder: TokensInput | None = None
        if is_pair:
            decoder = self._decoder_input(prompt.decoder, items)
        salt = _common_salt(encoder, prompt.decoder if is_pair else None)
        if salt is not None:
            processed["cache_salt"] = salt
        return self._complete(processed, decoder)

    def _encoder_data(self, prompt: ParsedPrompt) -> tuple[Mapping[str, Any], str | list[int]]:
        """The encoder's data, and the rest of the prompt, which the processor gets."""
        if prompt.has_mm_data:
            return prompt.mm_data, prompt.content
        if TEXT not in self.processor.info.supported_mm_limits:
            wanted = " or ".join(self.processor.info.supported_mm_limits)
            raise ValueError(
                f"the prompt has no {wanted}: the model needs one, over HTTP as an image_url part of "
                f'the prompt or message, in Python as {{"prompt": ..., "multi_modal_data": '
                f'{{"{wanted}": ...}}}}'
            )
        return {TEXT: [prompt.content]}, ""

    def _parse_items(self, mm_data: Mapping[str, Any]) -> MultiModalDataItems:
        items = self.processor.info.parse_mm_data(mm_data)
        counts = items.get_all_counts()
        if sum(counts.values()) != 1:
            found = ", ".join(f"{n} of {modality}" for modality, n in counts.items()) or "nothing"
            raise ValueError(
                f"the encoder takes one input, and multi_modal_data has {found}; the model takes: "
                f"{', '.join(self.processor.info.supported_mm_limits)}"
            )
        return items

    def _decoder_input(
        self, prompt: ParsedPrompt | None, items: MultiModalDataItems
    ) -> TokensInput:
        """The decoder's own part of a prompt in two parts; without one the processor's, made of
        nothing: what stands in the encoder's part never is the decoder's."""
        content: str | list[int] = (
            self.processor.create_decoder_prompt("", items) if prompt is None else prompt.content
        )
        text = content if isinstance(content, str) else prompt and prompt.text
        if isinstance(content, str):
            if content and self.tokenizer is None:
                raise ValueError(
                    "decoder_prompt: a text needs a tokenizer, and the engine was started with "
                    "skip_tokenizer_init: pass token ids"
                )
            content = self.processor.decoder_token_ids(content) if content else []
        return tokens_input(list(content), prompt=text or None)

    def _complete(
        self, encoder: MultiModalEncDecInput, decoder: TokensInput | None
    ) -> EncoderDecoderInput:
        """The decoder's prompt with its start token and, behind nothing else, the forced BOS."""
        skips = self.processor.skip_decoder_start_token
        start = self.decoder_start_token_id
        inputs = build_enc_dec_input(encoder, decoder, start, skips)
        token_ids = inputs["decoder_prompt"]["prompt_token_ids"]
        if token_ids == [start] and not skips and self.forced_bos_token_id is not None:
            token_ids.append(self.forced_bos_token_id)
        return inputs

    def features(self, inputs: EncoderDecoderInput) -> list[MultiModalFeatureSpec]:
        """The encoder's input as the engine takes it: one.

        Raises:
            ValueError: more tokens than the encoder takes, or none.
        """
        encoder = inputs["encoder_prompt"]
        (modality, ranges), *_ = encoder["mm_placeholders"].items()
        num_tokens = ranges[0].get_num_embeds()
        self._check_length(modality, num_tokens)
        identifier = encoder["mm_hashes"][modality][0]
        item = encoder["mm_kwargs"].require_data()[modality][0]
        position = PlaceholderRange(offset=0, length=num_tokens)
        return [MultiModalFeatureSpec(item, modality, identifier, position, identifier)]

    def _check_length(self, modality: str, num_tokens: int) -> None:
        info = self.processor.info
        max_model_len = self.model_config.max_model_len
        limits = info.get_mm_max_tokens_per_item(max_model_len, {modality: 1})
        limit = None if limits is None else limits.get(modality)
        if limit is None and not info.skip_prompt_length_check:
            limit = max_model_len
        if num_tokens < 1:
            raise ValueError(f"the {modality} is empty: it has no tokens for the encoder")
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"the {modality} is too long: {num_tokens} tokens, and this model's encoder takes "
                f"at most {limit}"
            )


def _common_salt(encoder: ParsedPrompt, decoder: ParsedPrompt | None) -> str | None:
    """The salt of either part: a request has one.

    Raises:
        ValueError: they have different ones.
    """
    salts = {part.cache_salt for part in (encoder, decoder) if part and part.cache_salt}
    if len(salts) > 1:
        raise ValueError("encoder_prompt and decoder_prompt have different cache_salts; give one")
    return next(iter(salts), None)

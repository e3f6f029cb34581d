# SPDX-License-Identifier: Apache-2.0
"""The processor of models with a text encoder: BART, mBART and their like.

Modality "text": a string, or token ids as the tokenizer would make them. The model's argument is
`encoder_input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.dummy_inputs import BaseDummyInputsBuilder
from vllm.multimodal.processing.one_item import PLACEHOLDER_TOKEN_ID, OneItemEncDecProcessor

if TYPE_CHECKING:
    from transformers import BatchFeature

    from vllm.config.multimodal import BaseDummyOptions
    from vllm.inputs import MultiModalDataDict


class TextProcessingInfo(BaseProcessingInfo):
    """One text in a prompt, as long as the encoder has positions."""

    skip_prompt_length_check = True

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"text": 1}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        return {"text": self.longest_text}

    @cached_property
    def longest_text(self) -> int:
        """In tokens."""
        config = self.ctx.model_config
        return config.hf_config_dict.get("max_position_embeddings") or config.max_model_len

    @cached_property
    def max_chars_per_token(self) -> int:
        """Of the tokenizer's longest token."""
        return max(map(len, self.get_tokenizer().get_vocab()), default=1)


class TextDummyInputsBuilder(BaseDummyInputsBuilder[TextProcessingInfo]):
    """Texts of the encoder's full length."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> MultiModalDataDict:
        longest = self.info.get_mm_max_tokens_per_item(seq_len, mm_counts)["text"]
        return {"text": [[PLACEHOLDER_TOKEN_ID] * longest] * mm_counts.get("text", 0)}


class TextEncDecProcessor(OneItemEncDecProcessor[TextProcessingInfo]):
    """Tokenises the encoder's text."""

    modality = "text"
    argument = "encoder_input_ids"

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        import torch
        from transformers import BatchFeature

        if mm_kwargs:
            raise ValueError(
                f"mm_processor_kwargs ({', '.join(mm_kwargs)}) are not supported by this model: a "
                "text's tokenisation has tokenization_kwargs"
            )
        texts = mm_data["texts"]
        ids = [self._token_ids(index, text, tok_kwargs) for index, text in enumerate(texts)]
        return BatchFeature({self.argument: [torch.tensor(one) for one in ids]})

    def _token_ids(
        self, index: int, text: str | list[int], tok_kwargs: Mapping[str, object]
    ) -> list[int]:
        if isinstance(text, str):
            options = {**self.info.default_tok_params.get_encode_kwargs(), **tok_kwargs}
            if not options.get("truncation"):
                self._refuse_far_too_long(text)
            text = self.info.get_tokenizer().encode(text, **options)
        if not text:
            raise ValueError(f"text {index} is empty: it has no tokens for the encoder")
        vocab_size = self.info.ctx.model_config.get_vocab_size()
        wrong = next((token for token in text if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"encoder token id {wrong} is out of range: the model has 0 to {vocab_size - 1}"
            )
        return text

    def _refuse_far_too_long(self, text: str) -> None:
        """A text of megabytes would keep a core busy only to be refused."""
        limit = self.info.longest_text
        if len(text) > limit and len(text) > limit * self.info.max_chars_per_token:
            raise ValueError(
                f"the text is too long: {len(text)} characters are more than the {limit} tokens of "
                "this model's encoder can hold"
            )

    def num_encoder_tokens(self, item: MultiModalKwargsItem) -> int:
        return len(item[self.argument].data)

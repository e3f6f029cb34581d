# SPDX-License-Identifier: Apache-2.0
"""What processors of models whose encoder takes one input have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.processor import EncDecMultiModalProcessor
from vllm.multimodal.processing.prompt_updates import PromptReplacement, PromptUpdate

if TYPE_CHECKING:
    from transformers import BatchFeature

_I = TypeVar("_I", bound=BaseProcessingInfo)

# Stands for an encoder token; never an input of the model.
PLACEHOLDER_TOKEN_ID = 0


class OneItemEncDecProcessor(EncDecMultiModalProcessor[_I]):
    """The encoder's prompt is a placeholder for each token that the encoder makes of the item.

    modality: what the encoder takes. argument: the model's for it, an entry for each item.
    """

    modality: ClassVar[str]
    argument: ClassVar[str]

    @abstractmethod
    def num_encoder_tokens(self, item: MultiModalKwargsItem) -> int:
        """Tokens that the encoder makes of it."""

    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        return [PLACEHOLDER_TOKEN_ID]

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {self.argument: MultiModalFieldConfig.batched(self.modality)}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        def placeholders(item_idx: int) -> list[int]:
            item = out_mm_kwargs.require_data()[self.modality][item_idx]
            return [PLACEHOLDER_TOKEN_ID] * self.num_encoder_tokens(item)

        return [PromptReplacement(self.modality, [PLACEHOLDER_TOKEN_ID], placeholders)]

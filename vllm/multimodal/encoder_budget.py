# SPDX-License-Identifier: Apache-2.0
"""The largest encoder input of a model: what memory and block tables are made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def max_encoder_tokens(model_config: ModelConfig) -> int:
    """Encoder tokens of one request at most: what the model's processing info says, else what its
    largest dummy input has.

    Raises:
        ValueError: the model's class has no processor.
    """
    info = MULTIMODAL_REGISTRY.get_processing_info(model_config)
    one_each = dict.fromkeys(info.get_supported_mm_limits(), 1)
    by_modality = info.get_mm_max_tokens_per_item(model_config.max_model_len, one_each)
    if by_modality is None:
        return dummy_encoder_input(model_config).mm_position.length
    return max(by_modality.values())


def dummy_encoder_input(model_config: ModelConfig) -> MultiModalFeatureSpec:
    """An input of the largest size, processed.

    Raises:
        ValueError: the model's class has no processor.
    """
    info = MULTIMODAL_REGISTRY.get_processing_info(model_config)
    features = (_dummy_of(model_config, modality) for modality in info.get_supported_mm_limits())
    return max(features, key=lambda feature: feature.mm_position.length)


def _dummy_of(model_config: ModelConfig, modality: str) -> MultiModalFeatureSpec:
    inputs = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(model_config, {modality: 1})
    (item,), (identifier,) = inputs["mm_kwargs"][modality], inputs["mm_hashes"][modality]
    (position,) = inputs["mm_placeholders"][modality]
    return MultiModalFeatureSpec(item, modality, identifier, position, identifier)

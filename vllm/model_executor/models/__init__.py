# SPDX-License-Identifier: Apache-2.0
"""Models. Importing this imports none of them, nor torch."""

from vllm.model_executor.models.interfaces import (
    SupportsMultiModal,
    SupportsPP,
    SupportsQuant,
    supports_multimodal,
    supports_pp,
)
from vllm.model_executor.models.interfaces_base import (
    VllmModel,
    VllmModelForTextGeneration,
    is_text_generation_model,
    is_vllm_model,
)
from vllm.model_executor.models.registry import ModelRegistry

__all__ = [
    "ModelRegistry",
    "SupportsMultiModal",
    "SupportsPP",
    "SupportsQuant",
    "VllmModel",
    "VllmModelForTextGeneration",
    "is_text_generation_model",
    "is_vllm_model",
    "supports_multimodal",
    "supports_pp",
]

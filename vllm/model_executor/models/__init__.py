# SPDX-License-Identifier: Apache-2.0
"""Models. Importing this imports none of them, nor torch."""

from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant, supports_pp
from vllm.model_executor.models.interfaces_base import (
    VllmModel,
    VllmModelForTextGeneration,
    is_text_generation_model,
    is_vllm_model,
)
from vllm.model_executor.models.registry import ModelRegistry

__all__ = [
    "ModelRegistry",
    "SupportsPP",
    "SupportsQuant",
    "VllmModel",
    "VllmModelForTextGeneration",
    "is_text_generation_model",
    "is_vllm_model",
    "supports_pp",
]

# SPDX-License-Identifier: Apache-2.0
"""Multimodal inputs. Importing this imports no torch."""

from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import BatchedTensorInputs, MultiModalKwargsItems, NestedTensors
from vllm.multimodal.registry import MultiModalRegistry

MULTIMODAL_REGISTRY = MultiModalRegistry()

__all__ = [
    "MULTIMODAL_REGISTRY",
    "BatchedTensorInputs",
    "MultiModalHasher",
    "MultiModalKwargsItems",
    "MultiModalRegistry",
    "NestedTensors",
]

# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: the methods by name. Imports no torch.

    int8, int4   weights of any checkpoint, quantised as they are loaded (CPU)
    gguf         the Q8_0, Q4_0 and Q4_1 weights of a GGUF file, as they are in it (CPU)
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, get_args

from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

QuantizationMethods = Literal["int8", "int4", "gguf"]
QUANTIZATION_METHODS: list[str] = list(get_args(QuantizationMethods))

_CONFIGS = {
    "int8": ("weight_only", "Int8Config"),
    "int4": ("weight_only", "Int4Config"),
    "gguf": ("gguf", "GGUFConfig"),
}

__all__ = [
    "QUANTIZATION_METHODS",
    "QuantizationConfig",
    "QuantizationMethods",
    "QuantizeMethodBase",
    "get_quantization_config",
]


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    """The config class of a method. Raises ValueError listing the methods there are."""
    if quantization not in _CONFIGS:
        raise ValueError(
            f"quantization {quantization!r} is not supported; supported: {', '.join(_CONFIGS)}"
        )
    module, name = _CONFIGS[quantization]
    return getattr(import_module(f"{__name__}.{module}"), name)

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: `get_rope` picks the kind that a config asks for."""

from __future__ import annotations

from typing import Any

import torch

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.scaled import (
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

__all__ = [
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "get_rope",
]

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# What YaRN's rope parameters may hold besides the factor and the original length.
_YARN_OPTIONS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)

# Layers with the same positions share one layer and its table.
_ropes: dict[tuple[Any, ...], RotaryEmbedding] = {}


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> RotaryEmbedding:
    """The rotary embedding that `rope_parameters` (Transformers' spelling) describes.

    `rope_theta` is the base (10000 where left out), `partial_rotary_factor` the rotated part of a
    head. Raises ValueError for a `rope_type` that is not supported or lacks a parameter.
    """
    parameters = dict(rope_parameters or {})
    dtype = dtype or torch.get_default_dtype()
    device = torch.get_default_device()
    key = (head_size, max_position, is_neox_style, repr(sorted(parameters.items())), dtype, device)
    if key not in _ropes:
        _ropes[key] = _make_rope(head_size, max_position, is_neox_style, parameters, dtype)
    return _ropes[key]


def _make_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool,
    parameters: dict[str, Any],
    dtype: torch.dtype,
) -> RotaryEmbedding:
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    base = parameters.get("rope_theta") or 10000.0
    rotary_dim = int(head_size * (parameters.get("partial_rotary_factor") or 1.0))
    common = (head_size, rotary_dim, max_position, base, is_neox_style, dtype)
    if rope_type == "default":
        return RotaryEmbedding(*common)
    if rope_type == "linear":
        (factor,) = _required(parameters, "linear", "factor")
        return LinearScalingRotaryEmbedding(*common, scaling_factor=factor)
    if rope_type == "dynamic":
        (factor,) = _required(parameters, "dynamic", "factor")
        return DynamicNTKScalingRotaryEmbedding(*common, scaling_factor=factor)
    if rope_type == "yarn":
        (original,) = _required(parameters, "yarn", "original_max_position_embeddings")
        factor = parameters.get("factor") or max_position / original
        options = {name: parameters[name] for name in _YARN_OPTIONS if name in parameters}
        return YaRNScalingRotaryEmbedding(*common, factor, original, **options)
    if rope_type == "llama3":
        names = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        return Llama3RotaryEmbedding(*common, *_required(parameters, "llama3", *names))
    raise ValueError(
        f"rope_type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )


def _required(parameters: dict[str, Any], rope_type: str, *names: str) -> tuple[Any, ...]:
    missing = [name for name in names if parameters.get(name) is None]
    if missing:
        raise ValueError(
            f"rope_type {rope_type!r} needs {', '.join(missing)} in the config's rope parameters"
        )
    return tuple(parameters[name] for name in names)

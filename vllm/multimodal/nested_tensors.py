# SPDX-License-Identifier: Apache-2.0
"""Tensors in lists of any depth: equality, and moves to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    NestedTensors: TypeAlias = (
        "list[NestedTensors] | list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]"
    )
else:
    # Annotations are read at run time (by msgspec); torch is not imported for them.
    NestedTensors: TypeAlias = Any

BatchedTensorInputs: TypeAlias = dict[str, NestedTensors]
"""Keyword arguments of a model: tensors batched over items, or lists where shapes differ."""


def nested_tensors_equal(a: NestedTensors, b: NestedTensors, check_dtype: bool = True) -> bool:
    """Whether both have the same structure and elements; NaN equals nothing.

    Args:
        check_dtype: whether tensors of different dtypes differ. Numbers are no tensors.
    """
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        return (
            isinstance(a, (list, tuple))
            and isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(nested_tensors_equal(x, y, check_dtype) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and (a.dtype == b.dtype or not check_dtype)
            and np.array_equal(a, b)
        )
    if not _is_tensor(a) or not _is_tensor(b):
        return not _is_tensor(a) and not _is_tensor(b) and a == b
    if a.shape != b.shape or (check_dtype and a.dtype != b.dtype):
        return False
    return bool((a == b).all())


def batched_tensors_equal(a: BatchedTensorInputs, b: BatchedTensorInputs) -> bool:
    """Whether both have the same keys with equal values."""
    return a.keys() == b.keys() and all(nested_tensors_equal(a[key], b[key]) for key in a)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: NestedTensors) -> Any:
    """`value` with `function` applied to each tensor; what is no tensor stays."""
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return function(value) if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    if isinstance(value, (int, float, str, bytes, type(None))):
        return False
    import torch

    return isinstance(value, torch.Tensor)

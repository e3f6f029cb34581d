# SPDX-License-Identifier: Apache-2.0
"""Tensors over bytes at given strides; torch is imported when one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .dims import Dim
from .support import exact_div, get_dtype_size, str_dtype_to_torch_dtype

if TYPE_CHECKING:
    import torch


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as flat int8."""
    import torch

    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(tensor.untyped_storage())


def shape_and_stride(tensor: torch.Tensor) -> str:
    """Shape and strides, both in elements, for errors about tensors that have no geometry."""
    return f"shape {tuple(tensor.shape)}, stride {tuple(tensor.stride())}"


def strided(raw: torch.Tensor, dtype: str, dims: Sequence[Dim], offset: int) -> torch.Tensor:
    """A view of `raw`'s bytes, from `offset` bytes behind its first on.

    Raises:
        ValueError: it would end behind `raw`.
    """
    import torch

    itemsize = get_dtype_size(dtype)
    storage = raw.untyped_storage()
    begin = raw.storage_offset() * raw.element_size()
    limit = begin + raw.numel() * raw.element_size() if raw.is_contiguous() else storage.nbytes()
    start = begin + offset
    end = start + sum((dim.size - 1) * dim.stride for dim in dims) + itemsize
    if end > limit:
        raise ValueError(f"a cache that ends at byte {end - begin} in {limit - begin} bytes")
    strides = [exact_div(dim.stride, itemsize) for dim in dims]
    empty = torch.empty(0, dtype=str_dtype_to_torch_dtype(dtype), device=raw.device)
    return empty.set_(storage, exact_div(start, itemsize), [dim.size for dim in dims], strides)

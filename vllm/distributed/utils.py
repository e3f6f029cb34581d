# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises ValueError where there is a remainder: a shard must not be rounded."""
    quotient, remainder = divmod(numerator, denominator)
    if remainder:
        raise ValueError(f"{numerator} cannot be divided evenly among {denominator}")
    return quotient


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """`tensor` cut into equal parts along its last dimension."""
    parts = tensor.split(divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts

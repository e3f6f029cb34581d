# SPDX-License-Identifier: Apache-2.0
"""Dimensions with roles and byte strides: how they are made, checked, and what bytes they reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ROLES = ("layer", "block", "kv", "head", "token", "content")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a cache. `stride`: bytes from one index to the next."""

    role: str
    size: int
    stride: int


def dense_strides(sizes: Sequence[int], order: Sequence[int], innermost: int) -> list[int]:
    """Byte strides of an array without gaps whose dimension `order[-1]` varies fastest, by
    `innermost` bytes."""
    strides, run = [0] * len(sizes), innermost
    for d in reversed(order):
        strides[d] = run
        run *= sizes[d]
    return strides


def memory_order(dims: Sequence[Dim]) -> tuple[int, ...]:
    """Indices of `dims` from the slowest to the fastest. Of equal strides the one of size 1 lies
    inside the other, as a dense array has it."""
    return tuple(sorted(range(len(dims)), key=lambda d: (-dims[d].stride, dims[d].size == 1)))


def plan_strides(
    roles: Sequence[str],
    shape: Sequence[int],
    order: tuple[int, ...],
    itemsize: int,
    kernel_blocks_per_page: int,
    pitch: int | None,
) -> list[int]:
    """Byte strides of a cache; the arguments are those of `KVCacheGeometry.plan`."""
    if pitch is None:
        return dense_strides(shape, order, itemsize)
    block = roles.index("block")
    order = (block, *(d for d in order if d != block))
    strides = dense_strides(shape, order, itemsize)
    spacing, gap = divmod(pitch, kernel_blocks_per_page)
    if gap or spacing % itemsize or spacing < strides[block]:
        raise ValueError(
            f"{kernel_blocks_per_page} kernel blocks of {strides[block]} bytes do not make a page "
            f"of {pitch} bytes"
        )
    strides[block] = spacing
    return strides


def check_dims(dims: tuple[Dim, ...], itemsize: int) -> None:
    """Raises:
    ValueError: the dimensions are no cache's, or two of its elements would share bytes.
    """
    roles = [dim.role for dim in dims]
    unknown = [role for role in roles if role not in ROLES]
    twice = [role for role in ROLES[:-1] if roles.count(role) > 1]
    if unknown or twice or "block" not in roles:
        raise ValueError(
            f"roles {tuple(roles)}: one block dimension, others at most once, of {', '.join(ROLES)}"
        )
    if any(dim.size < 1 or (dim.role == "kv" and dim.size != 2) for dim in dims):
        raise ValueError(f"sizes of {dims}: all at least 1, that of kv 2")
    reach = itemsize
    for dim in sorted((dim for dim in dims if dim.size > 1), key=lambda dim: dim.stride):
        if dim.stride < reach:
            raise ValueError(
                f"elements share bytes: every {dim.stride} bytes a {dim.role}, which reaches over "
                f"{reach}; byte strides: {', '.join(f'{d.role} {d.size} x {d.stride}' for d in dims)}"
            )
        reach = (dim.size - 1) * dim.stride + reach


def merged_steps(
    dims: Sequence[Dim], itemsize: int, kernel_blocks_per_page: int
) -> tuple[list[tuple[int, int]], int]:
    """A page as few long runs: (stride, count) from the slowest to the fastest, bytes of a run."""
    steps = [
        (dim.stride, kernel_blocks_per_page if dim.role == "block" else dim.size) for dim in dims
    ]
    inner = sorted(step for step in steps if step[1] > 1)
    length = itemsize
    while inner and inner[0][0] == length:
        length *= inner.pop(0)[1]
    return inner[::-1], length


@lru_cache(maxsize=1024)
def page_pattern(
    dims: tuple[Dim, ...], itemsize: int, kernel_blocks_per_page: int
) -> tuple[tuple[int, int], ...]:
    """Merged (offset, length) runs of page 0, from its start."""
    steps, length = merged_steps(dims, itemsize, kernel_blocks_per_page)
    offsets = [range(0, stride * count, stride) for stride, count in steps]
    runs: list[tuple[int, int]] = []
    # Slow dimensions first: strides are nested, so starts ascend.
    for start in map(sum, itertools.product(*offsets)):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return tuple(runs)

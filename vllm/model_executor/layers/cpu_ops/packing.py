# SPDX-License-Identifier: Apache-2.0
"""Packed weights: three-dimensional (N / PANEL, K / 2, 2 * PANEL), as packed_kernels.py reads them.

A weight is packed once, after loading, in place of the plain one. What is packed is known by its
dimensions, so layers that share a weight (a tied output projection) need no flag.
"""

from __future__ import annotations

import torch

from . import op_args
from .kernel_library import KernelTable
from .ops import LIBRARY, share
from .panel_sizes import MAX_ROWS, PANEL, SHARES
from .target import host_target
from .threads import Arguments, Counts, launch, num_threads, recording
from .weight_memory import empty_weight

_BYTES_WORTH_A_THREAD = 1 << 17
_LONG_PRODUCT = 1 << 24
_args = Arguments(op_args.PACKED_FORMAT, Counts(op_args.PACKED_M, op_args.PACKED_PANELS))
_embed_args = Arguments(op_args.EMBED_FORMAT)
_GEMM = KernelTable(LIBRARY, "packed_gemm")
_EMBED = KernelTable(LIBRARY, "embedding")
_NO_BIAS = torch.zeros(PANEL, dtype=torch.bfloat16)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether products with `weight` (N, K) are faster packed: bfloat16 where the CPU multiplies
    pairs, and sizes that fill panels."""
    return (
        weight.dim() == 2
        and weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.shape[0] % PANEL == 0
        and weight.shape[1] % 2 == 0
        and weight.numel() > 0
        and host_target().lanes == PANEL // 2
        and host_target().bf16_dot
    )


def is_packed(weight: torch.Tensor) -> bool:
    """Whether `pack` made it."""
    return weight.dim() == 3


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(N, K) -> (N / PANEL, K / 2, 2 * PANEL)."""
    n, k = weight.shape
    words = weight.contiguous().view(torch.int32).view(n // PANEL, PANEL, k // 2)
    packed = empty_weight(n // PANEL, k // 2, PANEL, dtype=torch.int32)
    packed.copy_(words.transpose(1, 2))
    return packed.view(torch.bfloat16)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight (N, K) that was packed."""
    panels, words, _ = packed.shape
    plain = torch.empty(panels, PANEL, words, dtype=torch.int32)
    plain.copy_(packed.view(torch.int32).transpose(1, 2))
    return plain.view(torch.bfloat16).view(panels * PANEL, 2 * words)


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K) times the packed weight transposed, plus bias (N): (..., N), float32 sums."""
    panels, words, _ = packed.shape
    size, n = 2 * words, panels * PANEL
    if x.shape[-1] != size or x.dtype is not torch.bfloat16:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit a packed weight ({n}, {size}) of bfloat16"
        )
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    m = rows.shape[0]
    out = x.new_empty((m, n))
    if m:
        _multiply(rows, packed, bias, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], n)


def _multiply(x, packed, bias, out) -> None:
    panels, words, _ = packed.shape
    kernel, _ = _GEMM[torch.bfloat16]
    m = x.shape[0]
    items = panels * -(-m // MAX_ROWS)
    threads = min(num_threads(), 1 + packed.numel() * 2 // _BYTES_WORTH_A_THREAD, items)
    has_bias = bias is not None
    if has_bias and (bias.dtype is not torch.bfloat16 or not bias.is_contiguous()):
        raise ValueError("the bias of a packed product must be contiguous bfloat16")
    _args.write(
        0,
        SHARES * threads,
        items,
        x.data_ptr(),
        2 * x.stride(0),
        packed.data_ptr(),
        4 * PANEL * words,
        bias.data_ptr() if has_bias else _NO_BIAS.data_ptr(),
        2 * PANEL if has_bias else 0,
        out.data_ptr(),
        2 * out.stride(0),
        m,
        words,
        panels,
    )
    launch(kernel, _args.address, threads, long=m * packed.numel() > _LONG_PRODUCT)


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of a table, plain (N, K) or packed, by ids: (..., K).

    Raises:
        IndexError: an id has no row. (In a program's replay nothing looks.)
    """
    packed = is_packed(table)
    rows, k = (PANEL * table.shape[0], 2 * table.shape[1]) if packed else table.shape
    if recording() is None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())} in {rows} rows")
    if ids.dtype is not torch.int32 or not ids.is_contiguous():
        ids = ids.to(torch.int32).contiguous()
    table = table.contiguous()
    kernel, size = _EMBED[table.dtype]
    out = table.new_empty((*ids.shape, k))
    # Packed, each word of a row lies in a cache line of its own.
    threads, step = share(ids.numel(), ids.numel() * k * (8 if packed else 2 * size))
    _embed_args.write(
        0,
        max(1, step),
        ids.numel(),
        ids.data_ptr(),
        table.data_ptr(),
        k * size,
        2 * k * PANEL if packed else 0,
        out.data_ptr(),
    )
    launch(kernel, _embed_args.address, threads)
    return out

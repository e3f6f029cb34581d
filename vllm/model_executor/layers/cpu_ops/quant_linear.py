# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T and rows of a table, for packed weights of 8 and 4 bits."""

from __future__ import annotations

import torch

from . import quant_args
from .kernel_library import KernelLibrary, KernelTable
from .ops import share
from .panel_sizes import MAX_ROWS, SHARES
from .quant_format import FORMATS, GROUP, PANEL, QuantFormat
from .threads import Arguments, Counts, launch, num_threads, recording

_BYTES_WORTH_A_THREAD = 1 << 17
_LONG_PRODUCT = 1 << 24
# Up to so many rows each thread quantises x itself: that is less than starting a kernel for it.
_FEW_ROWS = 8
_args = Arguments(
    quant_args.QUANT_FORMAT, Counts(quant_args.QUANT_M, quant_args.QUANT_PANELS)
)
_rows_args = Arguments(quant_args.ROWS_FORMAT)
_lookup_args = Arguments(quant_args.LOOKUP_FORMAT)
_LIBRARIES = {fmt: KernelLibrary(f"{__package__}.quant_{fmt.name}") for fmt in FORMATS}
_GEMM, _LOOKUP, _QUANTIZE_ROWS = (
    {fmt: KernelTable(library, name) for fmt, library in _LIBRARIES.items()}
    for name in ("gemm", "embedding", "quantize_rows")
)
_NO_BIAS = torch.zeros(PANEL, dtype=torch.float32)  # zero bytes in every dtype


def warmup_quantized(fmt: QuantFormat, dtype: torch.dtype) -> None:
    """Compiles a format's kernels for activations of a dtype, or loads them from disk."""
    _LIBRARIES[fmt].load(str(dtype).removeprefix("torch."))


def quantized_size(packed: torch.Tensor, fmt: QuantFormat) -> tuple[int, int]:
    """(N, K) of a packed weight."""
    panels, panel_bytes = packed.shape
    return panels * PANEL, panel_bytes // (PANEL * fmt.block_bytes) * GROUP


def quantized_linear(
    x: torch.Tensor, packed: torch.Tensor, fmt: QuantFormat, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K) times the packed weight transposed, plus bias (N): (..., N) in x's dtype.

    x is rounded to 8 bits by groups of 32, its largest magnitude in a group at 127; sums are float32.
    """
    n, k = quantized_size(packed, fmt)
    if x.shape[-1] != k:
        raise ValueError(f"x {tuple(x.shape)} does not fit a packed {fmt.name} weight ({n}, {k})")
    if bias is not None and (bias.dtype is not x.dtype or not bias.is_contiguous()):
        raise ValueError(f"the bias of a packed product must be contiguous and {x.dtype}, as x is")
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty((rows.shape[0], n))
    if rows.shape[0]:
        _multiply(rows, packed, fmt, bias, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], n)


def _quantize_rows(x: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """Rows (M, K) as the products read them: uint8 (M, groups * X_GROUP_BYTES)."""
    m, k = x.shape
    kernel, size = _QUANTIZE_ROWS[fmt][x.dtype]
    out = torch.empty(m, k // GROUP * quant_args.X_GROUP_BYTES, dtype=torch.uint8)
    threads, step = share(m, x.numel() * size)
    _rows_args.write(
        0, step, m, x.data_ptr(), x.stride(0) * size, out.data_ptr(), k // GROUP
    )
    launch(kernel, _rows_args.address, threads)
    return out


def _multiply(x, packed, fmt, bias, out) -> None:
    kernel, size = _GEMM[fmt][x.dtype]
    (m, k), panels = x.shape, packed.shape[0]
    x_bytes = m * (k // GROUP) * quant_args.X_GROUP_BYTES
    few = m <= _FEW_ROWS and x_bytes <= quant_args.STACK_BYTES
    ready = None if few else _quantize_rows(x, fmt)
    items = panels * -(-m // MAX_ROWS)
    threads = min(num_threads(), 1 + packed.numel() // _BYTES_WORTH_A_THREAD, items)
    _args.write(
        0,
        SHARES * threads,
        items,
        x.data_ptr(),
        x.stride(0) * size,
        0 if ready is None else ready.data_ptr(),
        packed.data_ptr(),
        packed.shape[1],
        _NO_BIAS.data_ptr() if bias is None else bias.data_ptr(),
        0 if bias is None else size * PANEL,
        out.data_ptr(),
        out.stride(0) * size,
        m,
        k // GROUP,
        panels,
    )
    launch(kernel, _args.address, threads, long=m * panels * PANEL * k > _LONG_PRODUCT)


def quantized_embedding(
    ids: torch.Tensor, packed: torch.Tensor, fmt: QuantFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a packed table by ids, their exact values rounded once to `dtype`: (..., K).

    Raises:
        IndexError: an id has no row. (In a program's replay nothing looks: its ids were sampled.)
    """
    rows, k = quantized_size(packed, fmt)
    if recording() is None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())} in {rows} rows")
    if ids.dtype is not torch.int32 or not ids.is_contiguous():
        ids = ids.to(torch.int32).contiguous()
    kernel, size = _LOOKUP[fmt][dtype]
    out = torch.empty((*ids.shape, k), dtype=dtype)
    threads, step = share(ids.numel(), out.numel() * size)
    _lookup_args.write(
        0,
        max(1, step),
        ids.numel(),
        ids.data_ptr(),
        packed.data_ptr(),
        packed.shape[1],
        k // GROUP,
        out.data_ptr(),
    )
    launch(kernel, _lookup_args.address, threads)
    return out

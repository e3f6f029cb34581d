# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T: our matrix-vector product for few rows of x, torch's product for more."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import op_args
from .kernel_library import KernelTable
from .ops import LIBRARY
from .packing import is_packed, packed_linear
from .threads import Arguments, Counts, launch, num_threads

# Crossover, measured with 1 and 2 threads on a 2-core AVX512_BF16 machine (Zen 4, weights larger
# than the caches): up to 4 rows `gemv` is 1.2 to 3 times as fast as oneDNN; at 8 rows it still is
# where x fits in half the L1 cache, and at 16 nowhere. float32: torch always.
_FEW_ROWS, _SOME_ROWS, _SMALL_K = 4, 8, 1024
_GEMV_DTYPES = (torch.bfloat16, torch.float16)
_BYTES_WORTH_A_THREAD = 1 << 17
_LONG_PRODUCT = 1 << 22
_args = Arguments(op_args.GEMV_FORMAT, Counts(op_args.GEMV_M))
_GEMV = KernelTable(LIBRARY, "gemv")


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M, K) times weight (N, K) transposed, plus bias (N): (M, N), float32 sums. For M up to
    about 8; K even.

    Every output is summed in the same order whatever M is.
    """
    (m, k), (n, weight_k), dtype = x.shape, weight.shape, x.dtype
    kernel, size = _GEMV[dtype]
    out = x.new_empty((m, n)) if out is None else out
    same = weight.dtype is dtype and out.dtype is dtype and (bias is None or bias.dtype is dtype)
    if not same or weight_k != k or k % 2 or out.shape != (m, n):
        raise ValueError(
            f"gemv: x {tuple(x.shape)} {dtype} does not fit "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
    (x_row, x_one), (w_row, w_one), (out_row, out_one) = x.stride(), weight.stride(), out.stride()
    if x_one != 1 or w_one != 1 or out_one != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError("gemv: the innermost stride of x, weight, bias and out must be 1")
    threads = min(num_threads(), 1 + n * k * size // _BYTES_WORTH_A_THREAD)
    step = n if threads == 1 else max(4, n // (8 * threads) // 4 * 4)
    _args.write(
        0,
        step,
        n,
        x.data_ptr(),
        x_row * size,
        weight.data_ptr(),
        w_row * size,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out_row * size,
        m,
        k,
    )
    launch(kernel, _args.address, threads, long=n * k > _LONG_PRODUCT)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear, by whichever product is the faster for so many rows; a packed
    weight has a product of its own."""
    if is_packed(weight):
        return packed_linear(x, weight, bias)
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    few = 0 < rows <= _FEW_ROWS or (0 < rows <= _SOME_ROWS and size <= _SMALL_K)
    if not few or x.dtype not in _GEMV_DTYPES or size % 2 or weight.stride(1) != 1:
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return gemv(x if x.stride(1) == 1 else x.contiguous(), weight, bias)
    return gemv(x.reshape(rows, size), weight, bias).view(*x.shape[:-1], weight.shape[0])

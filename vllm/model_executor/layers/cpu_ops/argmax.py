# SPDX-License-Identifier: Apache-2.0
"""argmax of rows, in their own dtype."""

from __future__ import annotations

import torch

from . import argmax_args as A
from .kernel_library import KernelTable
from .ops import LIBRARY
from .threads import Arguments, launch, num_threads

_MAX_SIZE = 1 << 24
# Some 1.5 ms of one thread: another one may have to wait for a core longer than it would help.
_BYTES_WORTH_A_THREAD = 1 << 24
_ARGMAX = KernelTable(LIBRARY, "argmax")
_args = Arguments(A.FORMAT)


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the maximum of each row of x (T, N) is, as `torch.argmax` says: its first place; NaN is
    the largest. Rows may lie apart.

    Returns the places (T,) int32, and (T,) bool whether the values there are -inf.

    Raises:
        ValueError: any other shape, no columns, or more than 2**24.
    """
    if x.dim() != 2 or not 0 < x.shape[1] <= _MAX_SIZE:
        raise ValueError(f"argmax takes (T, N) with N from 1 to {_MAX_SIZE}, not {tuple(x.shape)}")
    if x.stride(1) != 1:
        x = x.contiguous()
    (rows, size), (kernel, itemsize) = x.shape, _ARGMAX[x.dtype]
    places = torch.empty(rows, dtype=torch.int32)
    is_lowest = torch.empty(rows, dtype=torch.bool)
    threads = min(num_threads(), 1 + rows * size * itemsize // _BYTES_WORTH_A_THREAD)
    _args.write(
        0,
        max(1, rows // (4 * threads)),
        rows,
        x.data_ptr(),
        x.stride(0) * itemsize,
        size,
        places.data_ptr(),
        is_lowest.data_ptr(),
    )
    launch(kernel, _args.address, threads)
    return places, is_lowest

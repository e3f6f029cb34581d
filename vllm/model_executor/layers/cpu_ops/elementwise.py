# SPDX-License-Identifier: Apache-2.0
"""What torch computes in a model's step besides its layers, as kernels: for programs, which have
nothing else."""

from __future__ import annotations

import torch

from . import op_args
from .kernel_library import KernelTable
from .ops import LIBRARY, share
from .threads import Arguments, launch

_COPY, _SCALE = KernelTable(LIBRARY, "copy_rows"), KernelTable(LIBRARY, "scale")
_copy_args, _scale_args = Arguments(op_args.COPY_FORMAT), Arguments(op_args.SCALE_FORMAT)


def copy_rows(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x (T, N), whose rows may lie apart, to out (T, N) contiguous.

    Raises:
        ValueError: any other shape, or rows with gaps inside.
    """
    if x.dim() != 2 or x.stride(1) != 1 or out.shape != x.shape or not out.is_contiguous():
        raise ValueError(f"no kernel copies {tuple(x.shape)} with strides {x.stride()}")
    (rows, size), (kernel, itemsize) = x.shape, _COPY[x.dtype]
    threads, step = share(rows, 2 * rows * size * itemsize)
    x_row = x.stride(0) * itemsize
    _copy_args.write(0, step, rows, x.data_ptr(), x_row, out.data_ptr(), size * itemsize)
    launch(kernel, _copy_args.address, threads)
    return out


def scale(x: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """x (T, N) times a number, in float32, rounded to out (T, N); both contiguous.

    Raises:
        ValueError: any other shape or stride.
    """
    fits = x.dim() == 2 and out.shape == x.shape and out.dtype is x.dtype
    if not (fits and x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"no kernel multiplies {tuple(x.shape)} with strides {x.stride()}")
    (rows, size), (kernel, itemsize) = x.shape, _SCALE[x.dtype]
    threads, step = share(rows, 2 * rows * size * itemsize)
    _scale_args.write(0, step, rows, x.data_ptr(), out.data_ptr(), size, factor)
    launch(kernel, _scale_args.address, threads)
    return out

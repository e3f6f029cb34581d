# SPDX-License-Identifier: Apache-2.0
"""Sums with rows of a table; and what torch computes in a model's step besides its layers, as kernels:
for programs, which have nothing else."""

from __future__ import annotations

import torch

from . import op_args
from .kernel_library import KernelTable
from .ops import LIBRARY, share
from .threads import Arguments, launch, recording

_COPY, _SCALE = KernelTable(LIBRARY, "copy_rows"), KernelTable(LIBRARY, "scale")
_ADD_TABLE_ROWS = KernelTable(LIBRARY, "add_table_rows")
_copy_args, _scale_args = Arguments(op_args.COPY_FORMAT), Arguments(op_args.SCALE_FORMAT)
_added_args = Arguments(op_args.ADDED_FORMAT)


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


def add_table_rows(
    x: torch.Tensor, indices: torch.Tensor, table: torch.Tensor, offset: int = 0
) -> torch.Tensor:
    """x (T, N) plus rows `indices` + `offset` of a table (M, N), rounded once: (T, N). indices: int64
    (T,).

    Raises:
        IndexError: an index has no row. (In a program's replay nothing looks.)
        ValueError: shapes, dtypes or strides do not fit.
    """
    (rows, size), (table_rows, table_size) = x.shape, table.shape
    fits = size == table_size and x.dtype is table.dtype and x.stride(1) == 1
    if not fits or not table.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit a table {tuple(table.shape)} {table.dtype}"
        )
    if indices.dtype is not torch.int64 or indices.shape != (rows,) or not indices.is_contiguous():
        raise ValueError(f"indices must be contiguous int64 for {rows} rows, got {indices.dtype}")
    if recording() is None and rows:
        low, high = int(indices.min()) + offset, int(indices.max()) + offset
        if low < 0 or high >= table_rows:
            raise IndexError(f"rows from {low} to {high} of a table of {table_rows}")
    kernel, itemsize = _ADD_TABLE_ROWS[x.dtype]
    out = x.new_empty((rows, size))
    threads, step = share(rows, 3 * rows * size * itemsize)
    _added_args.write(
        0,
        step,
        rows,
        x.data_ptr(),
        x.stride(0) * itemsize,
        indices.data_ptr(),
        table.data_ptr() + offset * size * itemsize,
        out.data_ptr(),
        size,
    )
    launch(kernel, _added_args.address, threads)
    return out

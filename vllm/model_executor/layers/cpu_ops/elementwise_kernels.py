# SPDX-License-Identifier: Apache-2.0
"""Copies, multiples and sums of rows. Numba code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import op_args as A
from .rows import each_range, jit
from .simd import Simd


def make_copy_rows(simd: Simd) -> Callable:
    iload64, copy = simd.iload64, simd.copy

    @jit
    def body(p, first, stop):
        nbytes = iload64(p + A.COPY_ROW_BYTES)
        for row in range(first, stop):
            source = iload64(p + A.COPY_X) + row * iload64(p + A.COPY_X_ROW)
            copy(iload64(p + A.COPY_OUT) + row * nbytes, source, nbytes)

    return each_range(simd, body)


def make_scale(simd: Simd) -> Callable:
    """x * factor in float32, rounded once."""
    iload64, dload64, div, lanes, itemsize = (
        simd.iload64,
        simd.dload64,
        simd.div,
        simd.lanes,
        simd.itemsize,
    )
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail
    splat = simd.splat

    @jit
    def body(p, first, stop):
        size, factor = iload64(p + A.SCALE_SIZE), splat(np.float32(dload64(p + A.SCALE_FACTOR)))
        full = div(size, lanes) * lanes
        at, rest = itemsize * full, size - full
        for row in range(first, stop):
            x = iload64(p + A.SCALE_X) + row * size * itemsize
            out = iload64(p + A.SCALE_OUT) + row * size * itemsize
            for i in range(0, at, itemsize * lanes):
                store(out + i, load(x + i) * factor)
            if rest:
                store_tail(out + at, load_tail(x + at, rest) * factor, rest)

    return each_range(simd, body)


def make_add_table_rows(simd: Simd) -> Callable:
    """out[i] = x[i] + row indices[i] of a table, rounded once; indices int64."""
    iload64, div, lanes, itemsize = simd.iload64, simd.div, simd.lanes, simd.itemsize
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail

    @jit
    def body(p, first, stop):
        size, indices = iload64(p + A.ADDED_SIZE), iload64(p + A.ADDED_INDICES)
        full = div(size, lanes) * lanes
        at, rest, row_bytes = itemsize * full, size - full, itemsize * size
        for row in range(first, stop):
            x = iload64(p + A.ADDED_X) + row * iload64(p + A.ADDED_X_ROW)
            added = iload64(p + A.ADDED_TABLE) + iload64(indices + 8 * row) * row_bytes
            out = iload64(p + A.ADDED_OUT) + row * row_bytes
            for i in range(0, at, itemsize * lanes):
                store(out + i, load(x + i) + load(added + i))
            if rest:
                store_tail(out + at, load_tail(x + at, rest) + load_tail(added + at, rest), rest)

    return each_range(simd, body)

# SPDX-License-Identifier: Apache-2.0
"""Where the maximum of each row is. Numba code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from . import argmax_args as A
from .rows import each_range, jit
from .simd import Simd, _none, make_intrinsic, store

ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)
# Positions are float32, beside the values; this is behind all of them.
BEHIND = np.float32(1 << 24)


def make_choices(simd: Simd) -> tuple[Callable, Callable, Callable]:
    """Lane by lane `p` where x > y, `p` where x == y, `p` where x is no number; else `q`."""
    v = simd.vector
    return (
        make_intrinsic(
            v(v, v, v, v), lambda b, x, y, p, q: b.select(b.fcmp_ordered(">", x, y), p, q)
        ),
        make_intrinsic(
            v(v, v, v, v), lambda b, x, y, p, q: b.select(b.fcmp_ordered("==", x, y), p, q)
        ),
        make_intrinsic(
            v(v, v, v), lambda b, x, p, q: b.select(b.fcmp_unordered("uno", x, x), p, q)
        ),
    )


def make_istore8() -> Callable:
    """Stores the lowest byte."""
    byte = ir.IntType(8)
    return make_intrinsic(
        types.void(types.int64, types.int64),
        lambda b, a, x: _none(b, store(b, b.trunc(x, byte), a, 1)),
    )


def make_argmax(simd: Simd) -> Callable:
    """The first place of the largest value, and whether that is -inf; what is no number counts as the
    largest.

    Each lane keeps the first of its largest values, so that a row is read once. A row with NaN is
    read again, to find it.
    """
    iload64, istore32, istore8, div = simd.iload64, simd.istore32, make_istore8(), simd.div
    lanes, itemsize, load, load_tail, load1 = (
        simd.lanes,
        simd.itemsize,
        simd.load,
        simd.load_tail,
        simd.load1,
    )
    splat, iota_from, keep_range = simd.splat, simd.iota_from, simd.keep_range
    hmax, hsum = simd.hmax, simd.hsum
    if_greater, if_equal, if_nan = make_choices(simd)

    @jit
    def first_nan(x, size):
        for i in range(size):
            value = load1(x + itemsize * i)
            if value != value:
                return i
        return 0

    @jit
    def find(x, size):
        full = div(size, lanes) * lanes
        best, place, at, nans = splat(LOWEST), iota_from(0), iota_from(0), splat(ZERO)
        for i in range(0, itemsize * full, itemsize * lanes):
            value = load(x + i)
            place = if_greater(value, best, at, place)
            best = if_greater(value, best, value, best)
            nans = if_nan(value, splat(ONE), nans)
            at = at + splat(np.float32(lanes))
        if full < size:
            value = load_tail(x + itemsize * full, size - full)
            value = keep_range(value, full, 0, size, LOWEST)
            place = if_greater(value, best, at, place)
            best = if_greater(value, best, value, best)
            nans = if_nan(value, splat(ONE), nans)
        if hsum(nans) > ZERO:
            return first_nan(x, size), False
        largest = hmax(best)
        last_place = splat(-ONE) * if_equal(best, splat(largest), place, splat(BEHIND))
        return np.int64(-hmax(last_place)), largest == LOWEST

    @jit
    def body(p, first, stop):
        size = iload64(p + A.SIZE)
        for row in range(first, stop):
            place, is_lowest = find(iload64(p + A.X) + row * iload64(p + A.X_ROW), size)
            istore32(iload64(p + A.PLACES) + 4 * row, np.int32(place))
            istore8(iload64(p + A.IS_LOWEST) + row, np.int64(is_lowest))

    return each_range(simd, body)

# SPDX-License-Identifier: Apache-2.0
"""How kernels share rows among threads. Numba code."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from . import op_args as A
from .simd import Simd

jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def each_range(simd: Simd, body: Callable) -> Callable:
    """A kernel that takes STEP rows at a time off a counter and calls body(args, first, stop) on
    them.
    """
    iload64, atomic_add = simd.iload64, simd.atomic_add

    def kernel(p):
        rows, step = iload64(p + A.ROWS), iload64(p + A.STEP)
        first = atomic_add(p + A.NEXT, step)
        while first < rows:
            body(p, first, min(first + step, rows))
            first = atomic_add(p + A.NEXT, step)

    return kernel


def make_take_share(simd: Simd) -> Callable:
    """take_share(counter, items, shares) -> (first, stop), empty when nothing is left: one of `shares`
    of what is left, so that a thread reads long runs of what lies in memory in order, and ever fewer
    items, so that all threads end together (guided self-scheduling, Polychronopoulos and Kuck 1987).
    """
    atomic_load, compare_exchange, div = simd.atomic_load, simd.compare_exchange, simd.div

    @jit
    def take_share(counter, items, shares):
        while True:
            first = atomic_load(counter)
            if first >= items:
                return items, items
            stop = first + max(1, div(items - first, shares))
            if compare_exchange(counter, first, stop):
                return first, stop

    return take_share


def each_share(simd: Simd, body: Callable) -> Callable:
    """A kernel that calls body(args, first, stop) on shares, one of STEP, of its items."""
    iload64, take_share = simd.iload64, make_take_share(simd)

    def kernel(p):
        items, shares = iload64(p + A.ROWS), iload64(p + A.STEP)
        first, stop = take_share(p + A.NEXT, items, shares)
        while first < stop:
            body(p, first, stop)
            first, stop = take_share(p + A.NEXT, items, shares)

    return kernel

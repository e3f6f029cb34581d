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
    """take_share(args) -> (first, stop), empty when nothing is left: items that lie in memory in order
    are taken as a share of what is left, so that a thread reads long runs, and ever fewer, so that all
    threads end together (guided self-scheduling, Polychronopoulos and Kuck 1987). STEP: a share is one
    of so many.
    """
    iload64, atomic_load, div = simd.iload64, simd.atomic_load, simd.div
    compare_exchange = simd.compare_exchange

    @jit
    def take_share(p):
        items, shares = iload64(p + A.ROWS), iload64(p + A.STEP)
        while True:
            first = atomic_load(p + A.NEXT)
            if first >= items:
                return items, items
            stop = first + max(1, div(items - first, shares))
            if compare_exchange(p + A.NEXT, first, stop):
                return first, stop

    return take_share


def each_share(simd: Simd, body: Callable) -> Callable:
    """A kernel that calls body(args, first, stop) on shares of its items."""
    take_share = make_take_share(simd)

    def kernel(p):
        first, stop = take_share(p)
        while first < stop:
            body(p, first, stop)
            first, stop = take_share(p)

    return kernel

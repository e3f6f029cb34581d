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

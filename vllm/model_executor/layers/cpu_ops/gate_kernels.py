# SPDX-License-Identifier: Apache-2.0
"""Activations: act(x), and gated ones, act(gate) * up on rows that hold gate and up side by side. Numba
code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import op_args as A
from .rows import each_range, jit
from .simd import Simd

LOG2E, HALF, ONE, TWO = (
    np.float32(1.4426950408889634),
    np.float32(0.5),
    np.float32(1),
    np.float32(2),
)
# log2(erfc(x)) / x on [0, 4.6]: weighted least squares on Chebyshev nodes; erfc is within 6e-8
# (absolute).
ERFC_POLY = tuple(
    np.float32(c)
    for c in (
        -1.6279075145721436,
        -0.9184374809265137,
        -0.14834396541118622,
        0.027836855500936508,
        -0.00010218201350653544,
        -0.0020995764061808586,
        0.00075604795711115,
        -0.00012767825683113188,
        8.803876880847383e-06,
    )
)
ERFC_TOP, SQRT_HALF = np.float32(4.6), np.float32(0.7071067811865476)
TANH_SCALE, TANH_CUBE = (
    np.float32(2 * 0.7978845608028654 * 1.4426950408889634),
    np.float32(0.044715),
)


def make_silu(simd: Simd) -> Callable:
    exp2, splat = simd.exp2, simd.splat
    return jit(lambda x: x / (splat(ONE) + exp2(x * splat(-LOG2E))))


def make_gelu(simd: Simd) -> Callable:
    """x * Phi(x), Phi from erfc of |x|, so that its small values keep their digits."""
    exp2, splat, fma, absolute, maximum = (
        simd.exp2_weight,  # of negative numbers
        simd.splat,
        simd.fma,
        simd.absolute,
        simd.maximum,
    )
    choose_negative = simd.choose_negative
    c0, c1, c2, c3, c4, c5, c6, c7, c8 = ERFC_POLY

    @jit
    def gelu(x):
        y = absolute(x) * splat(SQRT_HALF)
        y = splat(-ONE) * maximum(splat(-ERFC_TOP), splat(-ONE) * y)
        q = fma(fma(fma(fma(splat(c8), y, splat(c7)), y, splat(c6)), y, splat(c5)), y, splat(c4))
        q = fma(fma(fma(fma(q, y, splat(c3)), y, splat(c2)), y, splat(c1)), y, splat(c0))
        upper = splat(HALF) * exp2(q * y)
        return x * choose_negative(x, upper, splat(ONE) - upper)

    return gelu


def make_gelu_tanh(simd: Simd) -> Callable:
    """x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): what (1 + tanh u) / 2 is."""
    exp2, splat, fma = simd.exp2, simd.splat, simd.fma

    @jit
    def gelu_tanh(x):
        inner = x * fma(x * x, splat(TANH_CUBE), splat(ONE))
        return x / (splat(ONE) + exp2(inner * splat(-TANH_SCALE)))

    return gelu_tanh


def make_gate(simd: Simd, activation: Callable) -> Callable:
    iload64, div, lanes, itemsize = simd.iload64, simd.div, simd.lanes, simd.itemsize
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail

    @jit
    def body(p, first, stop):
        size = iload64(p + A.GATE_SIZE)
        full = div(size, lanes) * lanes
        at, rest = itemsize * full, size - full
        for row in range(first, stop):
            gate = iload64(p + A.GATE_X) + row * iload64(p + A.GATE_X_ROW)
            up, out = (
                gate + itemsize * size,
                iload64(p + A.GATE_OUT) + row * iload64(p + A.GATE_OUT_ROW),
            )
            for i in range(0, at, itemsize * lanes):
                store(out + i, activation(load(gate + i)) * load(up + i))
            if rest:
                store_tail(
                    out + at,
                    activation(load_tail(gate + at, rest)) * load_tail(up + at, rest),
                    rest,
                )

    return each_range(simd, body)


def make_activate(simd: Simd, activation: Callable) -> Callable:
    """act(x), on as many values a row as the record says. Where the CPU rounds to bfloat16 itself it does
    so: a quarter of the time was that."""
    iload64, div, lanes, itemsize = simd.iload64, simd.div, simd.lanes, simd.itemsize
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail
    store_rounded = simd.store_weight if simd.pairs else simd.store

    @jit
    def body(p, first, stop):
        size = iload64(p + A.GATE_SIZE)
        full = div(size, lanes) * lanes
        at, rest = itemsize * full, size - full
        for row in range(first, stop):
            x = iload64(p + A.GATE_X) + row * iload64(p + A.GATE_X_ROW)
            out = iload64(p + A.GATE_OUT) + row * iload64(p + A.GATE_OUT_ROW)
            for i in range(0, at, itemsize * lanes):
                store_rounded(out + i, activation(load(x + i)))
            if rest:
                store_tail(out + at, activation(load_tail(x + at, rest)), rest)

    return each_range(simd, body)

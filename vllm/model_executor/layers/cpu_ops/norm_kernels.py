# SPDX-License-Identifier: Apache-2.0
"""RMS norm and layer norm over rows, with the residual added first where there is one. Numba
code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import op_args as A
from .rows import each_range, jit
from .simd import Simd

ZERO, ONE = np.float32(0), np.float32(1)


def make_add_residual(simd: Simd) -> Callable:
    """add(p, row): x + residual, rounded to the storage dtype, stored as the residual; returns
    where the sum is.
    """
    iload64, div, lanes, itemsize = simd.iload64, simd.div, simd.lanes, simd.itemsize
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail

    @jit
    def add(p, row):
        x, residual = (
            iload64(p + A.NORM_X) + row * iload64(p + A.NORM_X_ROW),
            iload64(p + A.NORM_RESIDUAL),
        )
        if not residual:
            return x
        residual += row * iload64(p + A.NORM_RESIDUAL_ROW)
        size = iload64(p + A.NORM_SIZE)
        full = div(size, lanes) * lanes
        for i in range(0, itemsize * full, itemsize * lanes):
            store(residual + i, load(x + i) + load(residual + i))
        if full < size:
            at = itemsize * full
            total = load_tail(x + at, size - full) + load_tail(residual + at, size - full)
            store_tail(residual + at, total, size - full)
        return residual

    return add


def make_weigh(simd: Simd) -> Callable:
    """As Llama does it: the normed value is rounded to the storage dtype before the weight
    multiplies it.
    """
    rounded = simd.round
    return jit(lambda normed, weight: rounded(normed) * weight)


def make_weigh_gemma(simd: Simd) -> Callable:
    """As Gemma does it: times 1 + weight, rounded when that is done."""
    splat = simd.splat
    return jit(lambda normed, weight: normed * (weight + splat(ONE)))


def make_rms_norm(simd: Simd, weigh: Callable) -> Callable:
    """`weigh(normed, weight)`: what the weight does."""
    iload64, dload64, div, lanes, itemsize = (
        simd.iload64,
        simd.dload64,
        simd.div,
        simd.lanes,
        simd.itemsize,
    )
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail
    splat, fma, hsum, sqrt, add = (
        simd.splat,
        simd.fma,
        simd.hsum,
        simd.sqrt,
        make_add_residual(simd),
    )

    @jit
    def factor(x, size, full, eps):
        total = splat(ZERO)
        for i in range(0, itemsize * full, itemsize * lanes):
            value = load(x + i)
            total = fma(value, value, total)
        if full < size:
            value = load_tail(x + itemsize * full, size - full)
            total = fma(value, value, total)
        return splat(ONE) / sqrt(splat(hsum(total) / np.float32(size) + eps))

    @jit
    def norm_row(p, row):
        x, size, weight = add(p, row), iload64(p + A.NORM_SIZE), iload64(p + A.NORM_WEIGHT)
        out = iload64(p + A.NORM_OUT) + row * iload64(p + A.NORM_OUT_ROW)
        full = div(size, lanes) * lanes
        scale = factor(x, size, full, np.float32(dload64(p + A.NORM_EPS)))
        for i in range(0, itemsize * full, itemsize * lanes):
            store(out + i, weigh(load(x + i) * scale, load(weight + i)))
        if full < size:
            at, rest = itemsize * full, size - full
            normed = load_tail(x + at, rest) * scale
            store_tail(out + at, weigh(normed, load_tail(weight + at, rest)), rest)

    @jit
    def body(p, first, stop):
        for row in range(first, stop):
            norm_row(p, row)

    return each_range(simd, body)


def make_layer_norm(simd: Simd) -> Callable:
    """(x - mean) / sqrt(variance + eps) * weight + bias, the variance from a second pass; rounded
    once.
    """
    iload64, dload64, div, lanes, itemsize = (
        simd.iload64,
        simd.dload64,
        simd.div,
        simd.lanes,
        simd.itemsize,
    )
    load, load_tail, store, store_tail, keep_range = (
        simd.load,
        simd.load_tail,
        simd.store,
        simd.store_tail,
        simd.keep_range,
    )
    splat, fma, hsum, sqrt, add = (
        simd.splat,
        simd.fma,
        simd.hsum,
        simd.sqrt,
        make_add_residual(simd),
    )

    @jit
    def moments(x, size, full, eps):
        total = splat(ZERO)
        for i in range(0, itemsize * full, itemsize * lanes):
            total = total + load(x + i)
        if full < size:
            total = total + load_tail(x + itemsize * full, size - full)
        mean, squares = splat(hsum(total) / np.float32(size)), splat(ZERO)
        for i in range(0, itemsize * full, itemsize * lanes):
            value = load(x + i) - mean
            squares = fma(value, value, squares)
        if full < size:
            value = keep_range(
                load_tail(x + itemsize * full, size - full) - mean, full, 0, size, ZERO
            )
            squares = fma(value, value, squares)
        return mean, splat(ONE) / sqrt(splat(hsum(squares) / np.float32(size) + eps))

    @jit
    def norm_row(p, row):
        x, size = add(p, row), iload64(p + A.NORM_SIZE)
        weight, bias = iload64(p + A.NORM_WEIGHT), iload64(p + A.NORM_BIAS)
        out = iload64(p + A.NORM_OUT) + row * iload64(p + A.NORM_OUT_ROW)
        full = div(size, lanes) * lanes
        mean, scale = moments(x, size, full, np.float32(dload64(p + A.NORM_EPS)))
        for i in range(0, itemsize * full, itemsize * lanes):
            shift = load(bias + i) if bias else splat(ZERO)
            store(out + i, fma((load(x + i) - mean) * scale, load(weight + i), shift))
        if full < size:
            at, rest = itemsize * full, size - full
            shift = load_tail(bias + at, rest) if bias else splat(ZERO)
            normed = (load_tail(x + at, rest) - mean) * scale
            store_tail(out + at, fma(normed, load_tail(weight + at, rest), shift), rest)

    @jit
    def body(p, first, stop):
        for row in range(first, stop):
            norm_row(p, row)

    return each_range(simd, body)

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys, in place or on the way into the cache. Numba
code.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import op_args as A
from .rows import each_range, jit
from .simd import Simd

ZERO = np.float32(0)


def make_rotate(simd: Simd) -> Callable:
    """rotate(p, angles, x, out): one head, in place where out is x; `angles`: cosines, then
    sines, float32.
    """
    iload64, copy, div, lanes, itemsize = (
        simd.iload64,
        simd.copy,
        simd.div,
        simd.lanes,
        simd.itemsize,
    )
    load, load_tail, store, store_tail = simd.load, simd.load_tail, simd.store, simd.store_tail
    fload, fload_tail, fload1, load1, store1 = (
        simd.fload,
        simd.fload_tail,
        simd.fload1,
        simd.load1,
        simd.store1,
    )
    fma, splat = simd.fma, simd.splat

    @jit
    def halves(angles, x, out, half):
        """Pairs (i, i + half)."""
        full, second = div(half, lanes) * lanes, itemsize * half
        for d in range(0, full, lanes):
            i, cos, sin = itemsize * d, fload(angles + 4 * d), fload(angles + 4 * (half + d))
            a, b = load(x + i), load(x + second + i)
            store(out + i, fma(a, cos, splat(ZERO) - b * sin))
            store(out + second + i, fma(b, cos, a * sin))
        if full < half:
            i, rest = itemsize * full, half - full
            cos, sin = (
                fload_tail(angles + 4 * full, rest),
                fload_tail(angles + 4 * (half + full), rest),
            )
            a, b = load_tail(x + i, rest), load_tail(x + second + i, rest)
            store_tail(out + i, fma(a, cos, splat(ZERO) - b * sin), rest)
            store_tail(out + second + i, fma(b, cos, a * sin), rest)

    @jit
    def neighbours(angles, x, out, half):
        """Pairs (2 i, 2 i + 1)."""
        for d in range(half):
            cos, sin, i = fload1(angles + 4 * d), fload1(angles + 4 * (half + d)), 2 * itemsize * d
            a, b = load1(x + i), load1(x + i + itemsize)
            store1(out + i, a * cos - b * sin)
            store1(out + i + itemsize, b * cos + a * sin)

    @jit
    def rotate(p, angles, x, out):
        rotary_dim = iload64(p + A.ROTARY_DIM)
        if iload64(p + A.ROTARY_NEOX):
            halves(angles, x, out, rotary_dim >> 1)
        else:
            neighbours(angles, x, out, rotary_dim >> 1)
        if out != x:
            done = itemsize * rotary_dim
            copy(out + done, x + done, itemsize * iload64(p + A.ROTARY_HEAD_SIZE) - done)

    return rotate


def make_rotary(simd: Simd) -> Callable:
    iload64, copy, div, rotate = simd.iload64, simd.copy, simd.div, make_rotate(simd)

    @jit
    def in_place(p, angles, base, head_stride, heads):
        for h in range(heads):
            rotate(p, angles, base + h * head_stride, base + h * head_stride)

    @jit
    def into_cache(p, angles, token, slot):
        size = iload64(p + A.ROTARY_TOKENS_PER_BLOCK)
        block = div(slot, size)
        offset = slot - block * size
        k, v = (
            iload64(p + A.ROTARY_K) + token * iload64(p + A.ROTARY_K_ROW),
            iload64(p + A.ROTARY_V),
        )
        v += token * iload64(p + A.ROTARY_V_ROW)
        kc = (
            iload64(p + A.ROTARY_KC)
            + block * iload64(p + A.ROTARY_KC_BLOCK)
            + offset * iload64(p + A.ROTARY_KC_TOKEN)
        )
        vc = (
            iload64(p + A.ROTARY_VC)
            + block * iload64(p + A.ROTARY_VC_BLOCK)
            + offset * iload64(p + A.ROTARY_VC_TOKEN)
        )
        for h in range(iload64(p + A.ROTARY_K_HEADS)):
            rotate(
                p,
                angles,
                k + h * iload64(p + A.ROTARY_K_HEAD),
                kc + h * iload64(p + A.ROTARY_KC_HEAD),
            )
            value, to = v + h * iload64(p + A.ROTARY_V_HEAD), vc + h * iload64(p + A.ROTARY_VC_HEAD)
            copy(to, value, iload64(p + A.ROTARY_V_SIZE))

    @jit
    def body(p, first, stop):
        slots, k_heads = iload64(p + A.ROTARY_SLOTS), iload64(p + A.ROTARY_K_HEADS)
        for token in range(first, stop):
            position = iload64(iload64(p + A.ROTARY_POSITIONS) + 8 * token)
            angles = iload64(p + A.ROTARY_TABLE) + position * iload64(p + A.ROTARY_TABLE_ROW)
            query = iload64(p + A.ROTARY_Q) + token * iload64(p + A.ROTARY_Q_ROW)
            in_place(p, angles, query, iload64(p + A.ROTARY_Q_HEAD), iload64(p + A.ROTARY_Q_HEADS))
            if slots:
                slot = iload64(slots + 8 * token)
                if slot >= 0:
                    into_cache(p, angles, token, slot)
            elif k_heads:
                key = iload64(p + A.ROTARY_K) + token * iload64(p + A.ROTARY_K_ROW)
                in_place(p, angles, key, iload64(p + A.ROTARY_K_HEAD), k_heads)

    return each_range(simd, body)

# SPDX-License-Identifier: Apache-2.0
"""Online softmax in base 2, the merging of its partial results, and the output. Numba code."""

from __future__ import annotations

import numpy as np
from numba import njit

from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import attend_args as A
from . import thread_record as W
from .tile_sizes import BLOCK

LOG2E = np.float32(1.4426950408889634)
MINUS_INF = np.float32(-np.inf)
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_scores(simd: Simd):
    """scores(p, w, s, row, first, vectors): scales, caps, biases and masks a row of S in place; returns
    its maximum.
    """
    iload64, dload64, fload1 = simd.iload64, simd.dload64, simd.fload1
    fload, fstore, splat, maximum, exp2 = (
        simd.fload,
        simd.fstore,
        simd.splat,
        simd.maximum,
        simd.exp2,
    )
    hmax, fma, keep_range = simd.hmax, simd.fma, simd.keep_range
    iota_from, lanes, div = simd.iota_from, simd.lanes, simd.div

    @_jit
    def scores(p, w, s, row, first, vectors):
        heads = iload64(p + A.GROUP)
        token = div(row, heads)
        position, low, high = iload64(w + W.POSITION) + token, 0, iload64(w + W.HIGH)
        if iload64(p + A.CAUSAL):
            high = position + 1
        if iload64(p + A.WINDOW) > 0:
            low = position + 1 - iload64(p + A.WINDOW)
        scale, cap, slopes = (
            np.float32(dload64(p + A.SCALE)),
            np.float32(dload64(p + A.SOFT_CAP)),
            iload64(p + A.ALIBI),
        )
        slope = ZERO
        if slopes:
            kv_head = iload64(w + W.KV_HEAD) + iload64(w + W.HEAD)
            slope = fload1(slopes + 4 * (kv_head * heads + row - token * heads)) * LOG2E
        masked = first < low or first + vectors * lanes > high
        peak, factor = splat(MINUS_INF), splat(scale if cap > ZERO else scale * LOG2E)
        for j in range(vectors):
            x = fload(s + 4 * lanes * j) * factor
            if cap > ZERO:  # cap * tanh(x / cap), tanh y = 1 - 2 / (1 + exp 2y)
                e = exp2(x * splat(TWO * LOG2E / cap))
                x = splat(cap * LOG2E) - splat(TWO * cap * LOG2E) / (e + splat(ONE))
            if slopes:
                x = fma(iota_from(first + j * lanes - position), splat(slope), x)
            if masked:
                x = keep_range(x, first + j * lanes, low, high, MINUS_INF)
            fstore(s + 4 * lanes * j, x)
            peak = maximum(peak, x)
        return hmax(peak)

    return scores


def make_softmax(simd: Simd):
    """softmax(p, w, acc, state, first, vectors): one block of S to P, with the running maximum
    and sum of each row.
    """
    scores, lanes, pairs = make_scores(simd), simd.lanes, simd.pairs
    iload64, fload1, fstore1, fload, fstore = (
        simd.iload64,
        simd.fload1,
        simd.fstore1,
        simd.fload,
        simd.fstore,
    )
    splat, exp2, hsum, first_lane = simd.splat, simd.exp2, simd.hsum, simd.first
    exp2_weight, store_weight = simd.exp2_weight, simd.store_weight

    @_jit
    def rescale(acc, n, factor):
        f = splat(factor)
        for d in range(0, n, lanes):
            fstore(acc + 4 * d, fload(acc + 4 * d) * f)

    @_jit
    def softmax(p, w, acc, state, first, vectors):
        s, out, padded_v = iload64(w + W.S), iload64(w + W.P), iload64(w + W.PADDED_V)
        for row in range(iload64(w + W.TOKENS) * iload64(p + A.GROUP)):
            old = fload1(state + 8 * row)
            top = max(old, scores(p, w, s, row, first, vectors))
            base, total = splat(top if top > MINUS_INF else ZERO), splat(ZERO)
            for j in range(vectors):
                e = exp2_weight(fload(s + 4 * lanes * j) - base)
                store_weight(out + (2 if pairs else 4) * lanes * j, e)
                total = total + e
            decay = ONE if top == old else first_lane(exp2(splat(old) - base))
            fstore1(state + 8 * row, top)
            fstore1(state + 8 * row + 4, fload1(state + 8 * row + 4) * decay + hsum(total))
            if decay != ONE:
                rescale(acc + 4 * padded_v * row, padded_v, decay)
            s += 4 * BLOCK
            out += 2 * BLOCK if pairs else 4 * BLOCK

    return softmax


def make_power(simd: Simd):
    """power(x): 2 to a number."""
    splat, exp2, first_lane = simd.splat, simd.exp2, simd.first

    @_jit
    def power(x):
        return first_lane(exp2(splat(x)))

    return power


def make_merge(simd: Simd):
    """merge(w, rows, acc, state): adds a chunk's result to TOTAL; clear_total(w, rows): TOTAL of no
    chunk.
    """
    iload64, fload1, fstore1, lanes = simd.iload64, simd.fload1, simd.fstore1, simd.lanes
    fload, fstore, splat, fma = simd.fload, simd.fstore, simd.splat, simd.fma
    power = make_power(simd)

    @_jit
    def merge(w, rows, acc, state):
        total, total_state, padded_v = (
            iload64(w + W.TOTAL),
            iload64(w + W.TOTAL_STATE),
            iload64(w + W.PADDED_V),
        )
        for row in range(rows):
            old, new = fload1(total_state + 8 * row), fload1(state + 8 * row)
            top = max(old, new)
            base = top if top > MINUS_INF else ZERO
            keep, add = power(old - base), power(new - base)
            fstore1(total_state + 8 * row, top)
            new_sum = fload1(state + 8 * row + 4) * add
            fstore1(total_state + 8 * row + 4, fload1(total_state + 8 * row + 4) * keep + new_sum)
            for d in range(row * padded_v, (row + 1) * padded_v, lanes):
                kept = fload(total + 4 * d) * splat(keep)
                fstore(total + 4 * d, fma(fload(acc + 4 * d), splat(add), kept))

    @_jit
    def clear_total(w, rows):
        total, total_state, padded_v = (
            iload64(w + W.TOTAL),
            iload64(w + W.TOTAL_STATE),
            iload64(w + W.PADDED_V),
        )
        for i in range(0, rows * padded_v, lanes):
            fstore(total + 4 * i, splat(ZERO))
        for row in range(rows):
            fstore1(total_state + 8 * row, MINUS_INF)
            fstore1(total_state + 8 * row + 4, ZERO)

    return merge, clear_total


def make_finish(simd: Simd):
    """finish(p, w): divides TOTAL and stores the tile's output."""
    iload64, fload1, fload, splat = simd.iload64, simd.fload1, simd.fload, simd.splat
    store, store_tail, lanes, itemsize, div = (
        simd.store,
        simd.store_tail,
        simd.lanes,
        simd.itemsize,
        simd.div,
    )
    power = make_power(simd)

    @_jit
    def weight(p, head, top, total):
        """What a row is multiplied with: 1 / sum, the sum including the head's sink; 0 for a row
        without keys.
        """
        sinks = iload64(p + A.SINKS)
        scale = ONE
        if sinks:
            sink = fload1(sinks + 4 * head) * LOG2E
            base = max(top, sink)
            scale = power(top - base)
            total = total * scale + power(sink - base)
        return scale / total if total != ZERO else ZERO

    @_jit
    def finish(p, w):
        heads, head_size, head0 = (
            iload64(p + A.GROUP),
            iload64(p + A.HEAD_SIZE),
            iload64(w + W.KV_HEAD),
        )
        head0, source, state = head0 * heads, iload64(w + W.TOTAL), iload64(w + W.TOTAL_STATE)
        out = iload64(p + A.OUT) + iload64(w + W.FIRST_TOKEN) * iload64(p + A.OUT_TOKEN)
        padded_v, full = iload64(w + W.PADDED_V), div(head_size, lanes) * lanes
        for t in range(iload64(w + W.TOKENS)):
            for g in range(heads * iload64(w + W.HEADS)):
                factor = splat(weight(p, head0 + g, fload1(state), fload1(state + 4)))
                to = out + t * iload64(p + A.OUT_TOKEN) + (head0 + g) * iload64(p + A.OUT_HEAD)
                for d in range(0, full, lanes):
                    store(to + itemsize * d, fload(source + 4 * d) * factor)
                if full < head_size:
                    store_tail(
                        to + itemsize * full, fload(source + 4 * full) * factor, head_size - full
                    )
                source, state = source + 4 * padded_v, state + 8

    return finish

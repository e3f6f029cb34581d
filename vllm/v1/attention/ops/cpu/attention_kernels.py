# SPDX-License-Identifier: Apache-2.0
"""Paged attention for CPUs, in compiled Python. Numba code: imported only when there is no compiled object in the cache.

A *tile* is up to ROWS query rows of one request that share a KV head (tokens x heads of the group). For a tile, keys are
taken BLOCK at a time: their addresses are looked up in the block table, K is transposed and V copied into scratch (a key
that nobody in the tile may see reads a row of zeros instead, so whatever its slot holds never enters a sum), then S = QK^T,
online softmax, acc += PV on register tiles (gemm.py).

Every CHUNK keys, counted from position 0, the softmax state starts anew and is merged into the running one. A decode row
over a long sequence can thus be split over threads chunk by chunk, and yet gives the same bits as the same row inside a
prefill tile, in any batch, with any number of threads: the operations on a row depend only on its keys. (One exception:
values below 1.2e-38 may be flushed to zero by the bfloat16 dot product.)

Softmax is computed base 2: log2(e) is folded into the scale.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vllm.model_executor.layers.cpu_ops.gemm import make_gemm
from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import attend_args as A
from . import cache_args as C
from . import thread_record as W
from .pack_kernels import make_pack
from .tile_sizes import BLOCK, CHUNK, ROWS, SPLIT_ROWS

LOG2E = np.float32(1.4426950408889634)
MINUS_INF = np.float32(-np.inf)
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_plan(simd: Simd):
    """plan(args): counts work items and scratch bytes, clears the counters. Serial, some nanoseconds a request."""
    iload64, istore64, iload32, div = simd.iload64, simd.istore64, simd.iload32, simd.div
    lanes, group = simd.lanes, simd.lanes * (2 if simd.dtype == "bfloat16" else 1)

    @_jit
    def plan_request(p, r):
        """(items, partial rows) of request r; the split of a request depends on nothing but itself."""
        num_kv_heads, heads = iload64(p + A.NUM_KV_HEADS), iload64(p + A.GROUP)
        starts, seq = iload64(p + A.QUERY_START), iload32(iload64(p + A.SEQ_LENS) + 4 * r)
        tokens = iload32(starts + 4 * r + 4) - iload32(starts + 4 * r)
        if tokens <= 0:
            return 0, 0
        rows = tokens * heads
        window = iload64(p + A.WINDOW)
        first = seq - tokens - window + 1 if window > 0 else 0
        first_chunk = div(max(first, 0), CHUNK)
        chunks = div(max(seq, 0) + CHUNK - 1, CHUNK) - first_chunk
        if rows <= SPLIT_ROWS and chunks > 1:
            return num_kv_heads * chunks, num_kv_heads * chunks * rows
        tile_tokens = max(div(ROWS, heads), 1)
        return num_kv_heads * div(tokens + tile_tokens - 1, tile_tokens), 0

    def plan(p):
        requests, head_size = iload64(p + A.NUM_REQUESTS), iload64(p + A.HEAD_SIZE)
        items_at = iload64(p + A.PREFIX)
        rows_at = items_at + 8 * (requests + 1)
        items = partial_rows = 0
        istore64(items_at, 0)
        istore64(rows_at, 0)
        for r in range(requests):
            more_items, more_rows = plan_request(p, r)
            items += more_items
            partial_rows += more_rows
            istore64(items_at + 8 * r + 8, items)
            istore64(rows_at + 8 * r + 8, partial_rows)
        counters = rows_at + 8 * (requests + 1)
        for i in range(requests * iload64(p + A.NUM_KV_HEADS)):
            istore64(counters + 8 * i, 0)
        padded_k = div(head_size + group - 1, group) * group
        padded_v = div(head_size + lanes - 1, lanes) * lanes
        rows = max(ROWS, iload64(p + A.GROUP))
        words = padded_k + 8 * BLOCK + padded_k * (rows + BLOCK) + BLOCK * padded_v
        words += 2 * rows * BLOCK + 2 * rows * padded_v + 4 * rows
        istore64(p + A.NUM_ITEMS, items)
        istore64(p + A.PARTIAL_BYTES, partial_rows * 4 * (padded_v + lanes))
        istore64(p + A.THREAD_BYTES, div(8 * W.COUNT + 4 * words + 16 * 64 + 4095, 4096) * 4096)

    return plan


def make_set_up(simd: Simd):
    """set_up(p, w): lays out a thread's scratch; w is the address of its record of addresses (class W)."""
    iload64, istore64, fstore, splat, div = simd.iload64, simd.istore64, simd.fstore, simd.splat, simd.div
    lanes, group = simd.lanes, simd.lanes * (2 if simd.dtype == "bfloat16" else 1)

    @_jit
    def place(w, field, address, nbytes):
        istore64(w + field, address)
        return address + div(nbytes + 63, 64) * 64

    @_jit
    def set_up(p, w):
        head_size, rows = iload64(p + A.HEAD_SIZE), max(ROWS, iload64(p + A.GROUP))
        padded_k = div(head_size + group - 1, group) * group
        padded_v = div(head_size + lanes - 1, lanes) * lanes
        istore64(w + W.PADDED_K, padded_k)
        istore64(w + W.PADDED_V, padded_v)
        at = w + div(8 * W.COUNT + 63, 64) * 64
        for i in range(0, padded_k, lanes):
            fstore(at + 4 * i, splat(ZERO))
        at = place(w, W.ZEROS, at, 4 * padded_k)
        at = place(w, W.K_ROWS, at, 16 * BLOCK)
        at = place(w, W.V_ROWS, at, 16 * BLOCK)
        at = place(w, W.Q, at, 4 * rows * padded_k)
        at = place(w, W.K, at, 4 * BLOCK * padded_k)
        at = place(w, W.V, at, 4 * BLOCK * padded_v)
        at = place(w, W.S, at, 4 * rows * BLOCK)
        at = place(w, W.P, at, 4 * rows * BLOCK)
        at = place(w, W.ACC, at, 4 * rows * padded_v)
        at = place(w, W.TOTAL, at, 4 * rows * padded_v)
        at = place(w, W.STATE, at, 8 * rows)
        place(w, W.TOTAL_STATE, at, 8 * rows)

    return set_up


def make_softmax(simd: Simd):
    """softmax(p, w, acc, state, first, vectors): one block of S to P, with the running maximum and sum of each row."""
    iload64, dload64, fload1, fstore1 = simd.iload64, simd.dload64, simd.fload1, simd.fstore1
    fload, fstore, splat, maximum, exp2 = simd.fload, simd.fstore, simd.splat, simd.maximum, simd.exp2
    hmax, hsum, first_lane, fma, keep_range = simd.hmax, simd.hsum, simd.first, simd.fma, simd.keep_range
    iota_from, pairs, lanes, div = simd.iota_from, simd.pairs, simd.lanes, simd.div
    exp2_weight, store_weight = simd.exp2_weight, simd.store_weight

    @_jit
    def scores(p, w, s, row, first, vectors):
        """Scales, caps, biases and masks a row of S in place; returns its maximum."""
        heads = iload64(p + A.GROUP)
        token = div(row, heads)
        position, low, high = iload64(w + W.POSITION) + token, 0, iload64(w + W.HIGH)
        if iload64(p + A.CAUSAL):
            high = position + 1
        if iload64(p + A.WINDOW) > 0:
            low = position + 1 - iload64(p + A.WINDOW)
        scale, cap, slopes = np.float32(dload64(p + A.SCALE)), np.float32(dload64(p + A.SOFT_CAP)), iload64(p + A.ALIBI)
        slope = ZERO
        if slopes:
            slope = fload1(slopes + 4 * (iload64(w + W.KV_HEAD) * heads + row - token * heads)) * LOG2E
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


def make_chunk(simd: Simd):
    """chunk(p, w, index, acc, state): attention of the tile over keys [index * CHUNK, (index + 1) * CHUNK)."""
    iload64, fload1, fstore1, fstore, splat, div = (
        simd.iload64, simd.fload1, simd.fstore1, simd.fstore, simd.splat, simd.div,
    )  # fmt: skip
    lanes, pairs = simd.lanes, simd.pairs
    gemm, softmax = make_gemm(simd, pairs), make_softmax(simd)
    _, fetch_first, pack_block = make_pack(simd)
    per_word = 2 if pairs else 1

    @_jit
    def block(p, w, acc, state, first, count):
        rows, padded_v = iload64(w + W.TOKENS) * iload64(p + A.GROUP), iload64(w + W.PADDED_V)
        pack_block(p, w, first, count)
        q, k, s = iload64(w + W.Q), iload64(w + W.K), iload64(w + W.S)
        vectors, words = div(count, lanes), div(iload64(p + A.HEAD_SIZE), per_word)
        gemm(q, 4 * iload64(w + W.PADDED_K), k, 4 * BLOCK, s, 4 * BLOCK, rows, vectors, words, 0)
        softmax(p, w, acc, state, first, vectors)
        v, probs, probs_stride = iload64(w + W.V), iload64(w + W.P), div(4 * BLOCK, per_word)
        columns = div(padded_v, lanes)
        gemm(probs, probs_stride, v, 4 * padded_v, acc, 4 * padded_v, rows, columns, div(count, per_word), 1)

    @_jit
    def chunk(p, w, index, acc, state):
        rows, padded_v = iload64(w + W.TOKENS) * iload64(p + A.GROUP), iload64(w + W.PADDED_V)
        for i in range(0, rows * padded_v, lanes):
            fstore(acc + 4 * i, splat(ZERO))
        for row in range(rows):
            fstore1(state + 8 * row, MINUS_INF)
            fstore1(state + 8 * row + 4, ZERO)
        low, high = iload64(w + W.LOW), min(iload64(w + W.HIGH), (index + 1) * CHUNK)
        start = max(index * CHUNK, div(low, BLOCK) * BLOCK)
        if start < high:
            fetch_first(p, w, start)
            for first in range(start, high, BLOCK):
                block(p, w, acc, state, first, div(min(BLOCK, high - first) + lanes - 1, lanes) * lanes)

    return chunk


def make_merge(simd: Simd):
    """merge(w, rows, acc, state): adds a chunk's result to TOTAL; finish(p, w): divides and stores the tile's output."""
    iload64, fload1, fstore1, iload32 = simd.iload64, simd.fload1, simd.fstore1, simd.iload32
    fload, fstore, splat, exp2, fma, first_lane = simd.fload, simd.fstore, simd.splat, simd.exp2, simd.fma, simd.first
    store, store_tail, lanes, itemsize, div = simd.store, simd.store_tail, simd.lanes, simd.itemsize, simd.div

    @_jit
    def power(x):
        return first_lane(exp2(splat(x)))

    @_jit
    def merge(w, rows, acc, state):
        total, total_state, padded_v = iload64(w + W.TOTAL), iload64(w + W.TOTAL_STATE), iload64(w + W.PADDED_V)
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
        total, total_state, padded_v = iload64(w + W.TOTAL), iload64(w + W.TOTAL_STATE), iload64(w + W.PADDED_V)
        for i in range(0, rows * padded_v, lanes):
            fstore(total + 4 * i, splat(ZERO))
        for row in range(rows):
            fstore1(total_state + 8 * row, MINUS_INF)
            fstore1(total_state + 8 * row + 4, ZERO)

    @_jit
    def weight(p, head, top, total):
        """What a row is multiplied with: 1 / sum, the sum including the head's sink; 0 for a row without keys."""
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
        heads, head_size, head0 = iload64(p + A.GROUP), iload64(p + A.HEAD_SIZE), iload64(w + W.KV_HEAD)
        head0, source, state = head0 * heads, iload64(w + W.TOTAL), iload64(w + W.TOTAL_STATE)
        out = iload64(p + A.OUT) + iload64(w + W.FIRST_TOKEN) * iload64(p + A.OUT_TOKEN)
        padded_v, full = iload64(w + W.PADDED_V), div(head_size, lanes) * lanes
        for t in range(iload64(w + W.TOKENS)):
            for g in range(heads):
                factor = splat(weight(p, head0 + g, fload1(state), fload1(state + 4)))
                to = out + t * iload64(p + A.OUT_TOKEN) + (head0 + g) * iload64(p + A.OUT_HEAD)
                for d in range(0, full, lanes):
                    store(to + itemsize * d, fload(source + 4 * d) * factor)
                if full < head_size:
                    store_tail(to + itemsize * full, fload(source + 4 * full) * factor, head_size - full)
                source, state = source + 4 * padded_v, state + 8

    return merge, clear_total, finish


def make_attend(simd: Simd):
    """attend(args): takes work items until there are none; runs on every thread."""
    iload64, istore64, iload32, atomic_add, div = simd.iload64, simd.istore64, simd.iload32, simd.atomic_add, simd.div
    lanes = simd.lanes
    set_up, chunk = make_set_up(simd), make_chunk(simd)
    pack_queries, _, _ = make_pack(simd)
    merge, clear_total, finish = make_merge(simd)

    @_jit
    def find_request(p, item):
        """The request whose range of items holds `item` (empty requests have empty ranges)."""
        prefix, low, high = iload64(p + A.PREFIX), 0, iload64(p + A.NUM_REQUESTS)
        while high - low > 1:
            middle = (low + high) >> 1
            if iload64(prefix + 8 * middle) <= item:
                low = middle
            else:
                high = middle
        return low

    @_jit
    def set_tile(p, w, r, kv_head, tile):
        """Says which rows the tile has and which keys [LOW, HIGH) any of them sees."""
        starts, seq = iload64(p + A.QUERY_START), iload32(iload64(p + A.SEQ_LENS) + 4 * r)
        start, stop = iload32(starts + 4 * r), iload32(starts + 4 * r + 4)
        tile_tokens = max(div(ROWS, iload64(p + A.GROUP)), 1)
        offset = tile * tile_tokens
        tokens = min(tile_tokens, stop - start - offset)
        position = seq - (stop - start) + offset
        low, high, window = 0, seq, iload64(p + A.WINDOW)
        if iload64(p + A.CAUSAL):
            high = min(seq, position + tokens)
        if window > 0:
            low = max(position - window + 1, 0)
        istore64(w + W.REQUEST, r)
        istore64(w + W.KV_HEAD, kv_head)
        istore64(w + W.FIRST_TOKEN, start + offset)
        istore64(w + W.TOKENS, tokens)
        istore64(w + W.POSITION, position)
        istore64(w + W.LOW, low)
        istore64(w + W.HIGH, high)

    @_jit
    def whole_tile(p, w):
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP)
        clear_total(w, rows)
        acc, state = iload64(w + W.ACC), iload64(w + W.STATE)
        for index in range(div(iload64(w + W.LOW), CHUNK), div(max(iload64(w + W.HIGH), 0) + CHUNK - 1, CHUNK)):
            chunk(p, w, index, acc, state)
            merge(w, rows, acc, state)
        finish(p, w)

    @_jit
    def split_tile(p, w, r, kv_head, index, chunks, first_row):
        """One chunk of a tile; whoever finishes the last one merges them all, in order."""
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP)
        bytes_per_row = 4 * iload64(w + W.PADDED_V)
        stride = rows * (bytes_per_row + 4 * lanes)
        at = iload64(p + A.PARTIAL) + first_row * (bytes_per_row + 4 * lanes) + kv_head * chunks * stride
        mine = at + index * stride
        chunk(p, w, div(iload64(w + W.LOW), CHUNK) + index, mine, mine + rows * bytes_per_row)
        requests = iload64(p + A.NUM_REQUESTS)
        counters = iload64(p + A.PREFIX) + 16 * (requests + 1)
        done = atomic_add(counters + 8 * (r * iload64(p + A.NUM_KV_HEADS) + kv_head), 1)
        if done == chunks - 1:
            clear_total(w, rows)
            for i in range(chunks):
                merge(w, rows, at + i * stride, at + i * stride + rows * bytes_per_row)
            finish(p, w)

    @_jit
    def run_item(p, w, item):
        r = find_request(p, item)
        prefix, kv_heads, requests = iload64(p + A.PREFIX), iload64(p + A.NUM_KV_HEADS), iload64(p + A.NUM_REQUESTS)
        first, stop = iload64(prefix + 8 * r), iload64(prefix + 8 * r + 8)
        partial = prefix + 8 * (requests + 1) + 8 * r
        first_row, stop_row = iload64(partial), iload64(partial + 8)
        item, per_head = item - first, div(stop - first, kv_heads)
        if stop_row > first_row:
            kv_head = div(item, per_head)
            set_tile(p, w, r, kv_head, 0)
            pack_queries(p, w)
            split_tile(p, w, r, kv_head, item - kv_head * per_head, per_head, first_row)
        else:  # the last tile sees the most keys: longest work first
            tile = div(item, kv_heads)
            set_tile(p, w, r, item - tile * kv_heads, per_head - 1 - tile)
            pack_queries(p, w)
            whole_tile(p, w)

    def attend(p):
        w = iload64(p + A.SCRATCH) + atomic_add(p + A.TICKET, 1) * iload64(p + A.THREAD_BYTES)
        set_up(p, w)
        items = iload64(p + A.NUM_ITEMS)
        item = atomic_add(p + A.NEXT_ITEM, 1)
        while item < items:
            run_item(p, w, item)
            item = atomic_add(p + A.NEXT_ITEM, 1)

    return attend


def make_cache(simd: Simd):
    """cache(args): copies keys and values to their slots, a range of tokens at a time; negative slots are skipped."""
    iload64, atomic_add, copy, div = simd.iload64, simd.atomic_add, simd.copy, simd.div

    @_jit
    def write_token(p, token, slot):
        size = iload64(p + C.TOKENS_PER_BLOCK)
        block = div(slot, size)
        offset = slot - block * size
        key, value = iload64(p + C.KEY) + token * iload64(p + C.KEY_TOKEN), iload64(p + C.VALUE)
        value += token * iload64(p + C.VALUE_TOKEN)
        k = iload64(p + C.K) + block * iload64(p + C.K_BLOCK) + offset * iload64(p + C.K_TOKEN)
        v = iload64(p + C.V) + block * iload64(p + C.V_BLOCK) + offset * iload64(p + C.V_TOKEN)
        for h in range(iload64(p + C.NUM_KV_HEADS)):
            copy(k + h * iload64(p + C.K_HEAD), key + h * iload64(p + C.KEY_HEAD), iload64(p + C.K_BYTES))
            copy(v + h * iload64(p + C.V_HEAD), value + h * iload64(p + C.VALUE_HEAD), iload64(p + C.V_BYTES))

    def cache(p):
        tokens, step, slots = iload64(p + C.NUM_TOKENS), iload64(p + C.STEP), iload64(p + C.SLOTS)
        first = atomic_add(p + C.NEXT, step)
        while first < tokens:
            for token in range(first, min(first + step, tokens)):
                slot = iload64(slots + 8 * token)
                if slot >= 0:
                    write_token(p, token, slot)
            first = atomic_add(p + C.NEXT, step)

    return cache


def build(simd: Simd) -> dict:
    return {"plan": make_plan(simd), "attend": make_attend(simd), "cache": make_cache(simd)}

# SPDX-License-Identifier: Apache-2.0
"""Paged attention for CPUs, in compiled Python. Numba code: imported only when there is no
compiled object in the cache.

A *tile* is up to ROWS query rows of one request that share a KV head (tokens x heads of the
group). For a tile, keys are taken BLOCK at a time: their addresses are looked up in the block
table, K is transposed and V copied into scratch (a key that nobody in the tile may see reads a
row of zeros instead, so whatever its slot holds never enters a sum), then S = QK^T, online
softmax, acc += PV on register tiles (gemm.py).

Every CHUNK keys, counted from position 0, the softmax state starts anew and is merged into the
running one. A decode row over a long sequence can thus be split over threads chunk by chunk, and
yet gives the same bits as the same row inside a prefill tile, in any batch, with any number of
threads: the operations on a row depend only on its keys. (One exception: values below 1.2e-38 may
be flushed to zero by the bfloat16 dot product.)

Softmax is computed base 2: log2(e) is folded into the scale.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vllm.model_executor.layers.cpu_ops.gemm import make_gemm
from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import attend_args as A
from . import thread_record as W
from .cache_kernels import make_cache
from .pack_kernels import make_locate, make_pack_block, make_pack_queries
from .softmax_kernels import make_finish, make_merge, make_softmax
from .tile_sizes import BLOCK, CHUNK, ROWS, SPLIT_ROWS

MINUS_INF = np.float32(-np.inf)
ZERO = np.float32(0)
_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_plan(simd: Simd):
    """plan(args): counts work items and scratch bytes, clears the counters. Serial, some
    nanoseconds a request.
    """
    iload64, istore64, iload32, div = simd.iload64, simd.istore64, simd.iload32, simd.div
    lanes, group = simd.lanes, simd.lanes * (2 if simd.dtype == "bfloat16" else 1)

    @_jit
    def plan_request(p, r, rows_left):
        """(items, partial rows) of request r. Split or not, its sums have one order; not split is
        what finds no room for its partial rows.
        """
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
        partial_rows = num_kv_heads * chunks * rows
        if rows <= SPLIT_ROWS and chunks > 1 and partial_rows <= rows_left:
            return num_kv_heads * chunks, partial_rows
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
            rows_left = iload64(p + A.MOST_PARTIAL_ROWS) - partial_rows
            more_items, more_rows = plan_request(p, r, rows_left)
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
    """set_up(p, w): lays out a thread's scratch; w is the address of its record of addresses
    (class W).
    """
    iload64, istore64, fstore, splat, div = (
        simd.iload64,
        simd.istore64,
        simd.fstore,
        simd.splat,
        simd.div,
    )
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


def make_chunk(simd: Simd):
    """chunk(p, w, index, acc, state): attention of the tile over keys [index * CHUNK, (index + 1)
    * CHUNK).
    """
    iload64, fstore1, fstore, splat = simd.iload64, simd.fstore1, simd.fstore, simd.splat
    div, lanes, pairs = simd.div, simd.lanes, simd.pairs
    gemm, softmax = make_gemm(simd, pairs), make_softmax(simd)
    _, _, fetch_first = make_locate(simd)
    pack_block = make_pack_block(simd)
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
        steps, row_bytes = div(count, per_word), 4 * padded_v
        gemm(probs, probs_stride, v, row_bytes, acc, row_bytes, rows, columns, steps, 1)

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
                vectors = div(min(BLOCK, high - first) + lanes - 1, lanes)
                block(p, w, acc, state, first, vectors * lanes)

    return chunk


def make_tiles(simd: Simd):
    """set_tile, whole_tile, split_tile: what a tile is, and its work at once or chunk by chunk."""
    iload64, istore64, iload32, atomic_add = (
        simd.iload64,
        simd.istore64,
        simd.iload32,
        simd.atomic_add,
    )
    div, lanes, chunk = simd.div, simd.lanes, make_chunk(simd)
    (merge, clear_total), finish = make_merge(simd), make_finish(simd)

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
        for index in range(
            div(iload64(w + W.LOW), CHUNK), div(max(iload64(w + W.HIGH), 0) + CHUNK - 1, CHUNK)
        ):
            chunk(p, w, index, acc, state)
            merge(w, rows, acc, state)
        finish(p, w)

    @_jit
    def split_tile(p, w, r, kv_head, index, chunks, first_row):
        """One chunk of a tile; whoever finishes the last one merges them all, in order."""
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP)
        bytes_per_row = 4 * iload64(w + W.PADDED_V)
        stride = rows * (bytes_per_row + 4 * lanes)
        at = (
            iload64(p + A.PARTIAL)
            + first_row * (bytes_per_row + 4 * lanes)
            + kv_head * chunks * stride
        )
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

    return set_tile, whole_tile, split_tile


def make_attend(simd: Simd):
    """attend(args): takes work items until there are none; runs on every thread."""
    iload64, atomic_add, div = simd.iload64, simd.atomic_add, simd.div
    set_up, pack_queries = make_set_up(simd), make_pack_queries(simd)
    set_tile, whole_tile, split_tile = make_tiles(simd)

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
    def run_item(p, w, item):
        r = find_request(p, item)
        prefix, kv_heads, requests = (
            iload64(p + A.PREFIX),
            iload64(p + A.NUM_KV_HEADS),
            iload64(p + A.NUM_REQUESTS),
        )
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


def build(simd: Simd) -> dict:
    return {"plan": make_plan(simd), "attend": make_attend(simd), "cache": make_cache(simd)}

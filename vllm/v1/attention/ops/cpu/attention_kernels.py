# SPDX-License-Identifier: Apache-2.0
"""Paged attention for CPUs, in compiled Python. Numba code: imported only when there is no
compiled object in the cache.

A *tile* is up to ROWS query rows of one request that share a KV head (tokens x heads of the
group). For a tile, keys are taken BLOCK at a time: their addresses are looked up in the block
table, K is transposed and V copied into scratch (a key that nobody in the tile may see reads a
row of zeros instead, so whatever its slot holds never enters a sum), then S = QK^T, online
softmax, acc += PV on register tiles (gemm.py). Tiles of few rows do without the copies
(narrow_kernels.py). While a block is at work, the next one is located and asked for, the next
tile's first one too.

Every CHUNK keys, counted from position 0, the softmax state starts anew and is merged into the
running one. A decode row over a long sequence can thus be split over threads chunk by chunk, and
yet gives the same bits as the same row inside a prefill tile, in any batch, with any number of
threads: the operations on a row depend only on its keys. (One exception: values below 1.2e-38 may
be flushed to zero by the bfloat16 dot product.)

Softmax is computed base 2: log2(e) is folded into the scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from vllm.model_executor.layers.cpu_ops.gemm import make_gemm
from vllm.model_executor.layers.cpu_ops.rows import make_take_share
from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import attend_args as A
from . import thread_record as W
from .cache_kernels import make_cache
from .narrow_kernels import make_narrow
from .pack_kernels import make_locate, make_pack_queries, make_pack_rows
from .softmax_kernels import make_finish, make_merge, make_softmax
from .tile_kernels import make_describe
from .tile_sizes import (
    ALL_HEADS_CHUNKS,
    BLOCK,
    CHUNK,
    NARROW_ROWS,
    NARROW_VALUES,
    ROWS,
    SHARES,
    SPLIT_ROWS,
)

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
    def measure(p, r):
        """(tokens, chunks of keys that they see) of request r."""
        starts, seq = iload64(p + A.QUERY_START), iload32(iload64(p + A.SEQ_LENS) + 4 * r)
        tokens = iload32(starts + 4 * r + 4) - iload32(starts + 4 * r)
        window = iload64(p + A.WINDOW)
        first = seq - tokens - window + 1 if window > 0 else 0
        return tokens, div(max(seq, 0) + CHUNK - 1, CHUNK) - div(max(first, 0), CHUNK)

    @_jit
    def has_tiles_of_all_heads(p, requests):
        """Whether that leaves each thread enough of them, and they fit."""
        if iload64(p + A.NUM_KV_HEADS) * iload64(p + A.GROUP) > ROWS:
            return 0
        all_chunks = 0
        for r in range(requests):
            tokens, chunks = measure(p, r)
            all_chunks += chunks if tokens == 1 else 0
        return 1 if all_chunks * SHARES >= ALL_HEADS_CHUNKS * iload64(p + A.SHARES) else 0

    @_jit
    def plan_request(p, r, rows_left):
        """(items, partial rows) of request r. Split or not, its sums have one order; not split is
        what finds no room for its partial rows.
        """
        num_kv_heads, heads = iload64(p + A.NUM_KV_HEADS), iload64(p + A.GROUP)
        tokens, chunks = measure(p, r)
        if tokens <= 0:
            return 0, 0
        tiles = 1 if tokens == 1 and iload64(p + A.ALL_HEADS) else num_kv_heads
        rows = tokens * heads
        partial_rows = num_kv_heads * chunks * rows
        if rows <= SPLIT_ROWS and chunks > 1 and partial_rows <= rows_left:
            return tiles * chunks, partial_rows
        tile_tokens = max(div(ROWS, heads), 1)
        return tiles * div(tokens + tile_tokens - 1, tile_tokens), 0

    def plan(p):
        requests, head_size = iload64(p + A.NUM_REQUESTS), iload64(p + A.HEAD_SIZE)
        items_at = iload64(p + A.PREFIX)
        rows_at = items_at + 8 * (requests + 1)
        items = partial_rows = 0
        istore64(p + A.ALL_HEADS, has_tiles_of_all_heads(p, requests))
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
        istore64(w + W.TURN, 0)
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


def make_look_ahead(simd: Simd, locate: Callable) -> Callable:
    """look_ahead(p, w, first): locates what comes after the block at `first`, the same keys of the next
    head, this tile's next block or the next tile's first, in the half of the tables that is not this
    turn's; returns (this half, the half of what comes then), the same where nothing does.
    """
    iload64, istore64 = simd.iload64, simd.istore64

    @_jit
    def look_ahead(p, w, first):
        half, following = iload64(w + W.TURN), w + W.NEXT
        other, start = 8 * BLOCK - half, iload64(following + W.START)
        kv_head, head = iload64(w + W.KV_HEAD), iload64(w + W.HEAD)
        istore64(w + W.TURN, other)
        if head + 1 < iload64(w + W.HEADS):
            locate(p, w, w, kv_head + head + 1, first, other)
        elif first + BLOCK < iload64(w + W.END):
            locate(p, w, w, kv_head, first + BLOCK, other)
        elif start < iload64(following + W.END):
            locate(p, w, following, iload64(following + W.KV_HEAD), start, other)
            istore64(w + W.LOCATED, 1)
        else:
            return half, half
        return half, other

    return look_ahead


def make_wide_block(simd: Simd, softmax: Callable, fetch: Callable) -> Callable:
    """wide(p, w, acc, state, first, count, half, other): `count` keys from `first` over tiles of packed
    copies.
    """
    iload64, div, lanes, gemm = simd.iload64, simd.div, simd.lanes, make_gemm(simd, simd.pairs)
    per_word, (pack_keys, pack_values) = 2 if simd.pairs else 1, make_pack_rows(simd)

    @_jit
    def wide(p, w, acc, state, first, count, half, other):
        rows, padded_v = iload64(w + W.TOKENS) * iload64(p + A.GROUP), iload64(w + W.PADDED_V)
        for j in range(0, count, lanes):
            fetch(p, w, other + 8 * j, lanes)
            pack_keys(p, w, half, j)
        pack_values(p, w, half, count)
        k, s, q_stride = iload64(w + W.K), iload64(w + W.S), 4 * iload64(w + W.PADDED_K)
        q = iload64(w + W.Q) + iload64(w + W.HEAD) * rows * q_stride
        vectors, words = div(count, lanes), div(iload64(p + A.HEAD_SIZE), per_word)
        gemm(q, q_stride, k, 4 * BLOCK, s, 4 * BLOCK, rows, vectors, words, 0)
        softmax(p, w, acc, state, first, vectors)
        v, probs, probs_stride = iload64(w + W.V), iload64(w + W.P), div(4 * BLOCK, per_word)
        columns, steps, stride = div(padded_v, lanes), div(count, per_word), 4 * padded_v
        gemm(probs, probs_stride, v, stride, acc, stride, rows, columns, steps, 1)

    return wide


def make_narrow_block(simd: Simd, softmax: Callable, fetch: Callable) -> Callable:
    """narrow(p, w, acc, state, first, count, half, other): the same for few rows, without copies."""
    iload64, div, lanes, prefetch = simd.iload64, simd.div, simd.lanes, simd.prefetch
    scores, values = make_narrow(simd)

    @_jit
    def narrow(p, w, acc, state, first, count, half, other):
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP)
        for j in range(0, count, lanes):
            scores(p, w, rows, half, other, j)
        keys, row_bytes = iload64(w + W.K_ROWS) + other, 2 * iload64(p + A.HEAD_SIZE)
        for j in range(lanes):
            for offset in range(0, row_bytes, 64):
                prefetch(iload64(keys + 8 * j) + offset)
        softmax(p, w, acc, state, first, div(count, lanes))
        values(p, w, rows, half, other, acc, count)
        if other != half:
            fetch(p, w, other + 8 * count, BLOCK - count)

    return narrow


def make_block(simd: Simd, locate: Callable, fetch: Callable) -> Callable:
    """block(p, w, acc, state, first, count): the tile's rows over `count` keys from `first`, whose
    addresses are in this turn's half of the tables. Meanwhile it asks for what comes then.
    """
    iload64, look_ahead, softmax = simd.iload64, make_look_ahead(simd, locate), make_softmax(simd)
    wide, most_rows = make_wide_block(simd, softmax, fetch), NARROW_ROWS if simd.pairs else 0
    narrow = make_narrow_block(simd, softmax, fetch) if simd.pairs else wide

    @_jit
    def block(p, w, acc, state, first, count):
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP)
        half, other = look_ahead(p, w, first)
        if rows <= most_rows and iload64(p + A.HEAD_SIZE) & (NARROW_VALUES - 1) == 0:
            narrow(p, w, acc, state, first, count, half, other)
        else:
            wide(p, w, acc, state, first, count, half, other)

    return block


def make_chunk(simd: Simd, block: Callable) -> Callable:
    """chunk(p, w, index, acc, state): attention of the tile over keys [index * CHUNK, (index + 1)
    * CHUNK), head after head for each block: what heads have in a page lies side by side, and memory
    gives the most in order.
    """
    iload64, istore64, fstore1, fstore = simd.iload64, simd.istore64, simd.fstore1, simd.fstore
    splat, div, lanes = simd.splat, simd.div, simd.lanes

    @_jit
    def chunk(p, w, index, acc, state):
        rows, padded_v = iload64(w + W.TOKENS) * iload64(p + A.GROUP), iload64(w + W.PADDED_V)
        heads = iload64(w + W.HEADS)
        for i in range(0, heads * rows * padded_v, lanes):
            fstore(acc + 4 * i, splat(ZERO))
        for row in range(heads * rows):
            fstore1(state + 8 * row, MINUS_INF)
            fstore1(state + 8 * row + 4, ZERO)
        start = max(index * CHUNK, iload64(w + W.START))
        high = min(iload64(w + W.END), (index + 1) * CHUNK)
        for first in range(start, high, BLOCK):
            vectors = div(min(BLOCK, high - first) + lanes - 1, lanes)
            for head in range(heads):
                istore64(w + W.HEAD, head)
                head_acc = acc + 4 * padded_v * rows * head
                block(p, w, head_acc, state + 8 * rows * head, first, vectors * lanes)

    return chunk


def make_tiles(simd: Simd, chunk: Callable) -> tuple[Callable, Callable]:
    """whole_tile(p, w), split_tile(p, w): a tile's work at once, or one chunk's of it."""
    iload64, atomic_add, lanes, div = simd.iload64, simd.atomic_add, simd.lanes, simd.div
    (merge, clear_total), finish = make_merge(simd), make_finish(simd)

    @_jit
    def whole_tile(p, w):
        rows = iload64(w + W.TOKENS) * iload64(p + A.GROUP) * iload64(w + W.HEADS)
        clear_total(w, rows)
        acc, state = iload64(w + W.ACC), iload64(w + W.STATE)
        for index in range(
            div(iload64(w + W.LOW), CHUNK), div(max(iload64(w + W.HIGH), 0) + CHUNK - 1, CHUNK)
        ):
            chunk(p, w, index, acc, state)
            merge(w, rows, acc, state)
        finish(p, w)

    @_jit
    def split_tile(p, w):
        """One chunk of a tile; whoever finishes the last one merges them all, in order."""
        rows, chunks = iload64(w + W.TOKENS) * iload64(p + A.GROUP), iload64(w + W.CHUNKS)
        rows *= iload64(w + W.HEADS)
        index, kv_head, heads = (
            iload64(w + W.INDEX),
            iload64(w + W.KV_HEAD),
            iload64(p + A.NUM_KV_HEADS),
        )
        bytes_per_row = 4 * iload64(w + W.PADDED_V)
        stride = rows * (bytes_per_row + 4 * lanes)
        at = iload64(p + A.PARTIAL) + iload64(w + W.FIRST_ROW) * (bytes_per_row + 4 * lanes)
        at += kv_head * chunks * stride
        mine = at + index * stride
        chunk(p, w, div(iload64(w + W.LOW), CHUNK) + index, mine, mine + rows * bytes_per_row)
        counters = iload64(p + A.PREFIX) + 16 * (iload64(p + A.NUM_REQUESTS) + 1)
        done = atomic_add(counters + 8 * (iload64(w + W.REQUEST) * heads + kv_head), 1)
        if done == chunks - 1:
            clear_total(w, rows)
            for i in range(chunks):
                merge(w, rows, at + i * stride, at + i * stride + rows * bytes_per_row)
            finish(p, w)

    return whole_tile, split_tile


def make_attend(simd: Simd) -> Callable:
    """attend(args): takes work items until there are none; runs on every thread."""
    iload64, istore64, atomic_add, copy = simd.iload64, simd.istore64, simd.atomic_add, simd.copy
    set_up, pack_queries, describe = make_set_up(simd), make_pack_queries(simd), make_describe(simd)
    (locate, fetch), take_share = make_locate(simd), make_take_share(simd)
    chunk = make_chunk(simd, make_block(simd, locate, fetch))
    whole_tile, split_tile = make_tiles(simd, chunk)

    @_jit
    def next_tile(p, w, item, stop):
        """Moves on to `item`, the next tile, and says which is then: what it reads is asked for while
        this one is at work.
        """
        copy(w + W.REQUEST, w + W.REQUEST + W.NEXT, W.TILE_BYTES)
        if item + 1 < stop:
            describe(p, w + W.NEXT, item + 1)
        else:
            istore64(w + W.NEXT + W.END, -1)
        start = iload64(w + W.START)
        if iload64(w + W.LOCATED) == 0 and start < iload64(w + W.END):
            locate(p, w, w, iload64(w + W.KV_HEAD), start, iload64(w + W.TURN))
            fetch(p, w, iload64(w + W.TURN), BLOCK)
        istore64(w + W.LOCATED, 0)

    @_jit
    def run_items(p, w, first, stop):
        describe(p, w + W.NEXT, first)
        istore64(w + W.LOCATED, 0)
        for item in range(first, stop):
            next_tile(p, w, item, stop)
            pack_queries(p, w)
            if iload64(w + W.CHUNKS):
                split_tile(p, w)
            else:
                whole_tile(p, w)

    def attend(p):
        w = iload64(p + A.SCRATCH) + atomic_add(p + A.TICKET, 1) * iload64(p + A.THREAD_BYTES)
        set_up(p, w)
        items, shares = iload64(p + A.NUM_ITEMS), iload64(p + A.SHARES)
        first, stop = take_share(p + A.NEXT_ITEM, items, shares)
        while first < stop:
            run_items(p, w, first, stop)
            first, stop = take_share(p + A.NEXT_ITEM, items, shares)

    return attend


def build(simd: Simd) -> dict:
    return {"plan": make_plan(simd), "attend": make_attend(simd), "cache": make_cache(simd)}

# SPDX-License-Identifier: Apache-2.0
"""Work items of the attention kernel: which rows and keys each stands for. Numba code."""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import attend_args as A
from . import thread_record as W
from .tile_sizes import BLOCK, CHUNK, ROWS

_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_set_rows(simd: Simd) -> Callable:
    """set_rows(p, t, r, kv_head, heads, tile): rows of the tile, and the keys [LOW, HIGH) that any of them
    sees; `t`: where the tile's words are.
    """
    iload64, istore64, iload32, div = simd.iload64, simd.istore64, simd.iload32, simd.div

    @_jit
    def set_rows(p, t, r, kv_head, heads, tile):
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
        istore64(t + W.REQUEST, r)
        istore64(t + W.KV_HEAD, kv_head)
        istore64(t + W.HEADS, heads)
        istore64(t + W.FIRST_TOKEN, start + offset)
        istore64(t + W.TOKENS, tokens)
        istore64(t + W.POSITION, position)
        istore64(t + W.LOW, low)
        istore64(t + W.HIGH, high)
        istore64(t + W.START, div(low, BLOCK) * BLOCK)
        istore64(t + W.END, high)
        istore64(t + W.CHUNKS, 0)

    return set_rows


def make_describe(simd: Simd) -> Callable:
    """describe(p, t, item): writes what an item is as a tile's words."""
    iload64, istore64, iload32, div = simd.iload64, simd.istore64, simd.iload32, simd.div
    set_rows = make_set_rows(simd)

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
    def set_chunk(t, index, chunks, first_row):
        """Only the keys of one chunk, the `index`-th that the tile sees."""
        first = (div(iload64(t + W.LOW), CHUNK) + index) * CHUNK
        istore64(t + W.START, max(first, iload64(t + W.START)))
        istore64(t + W.END, min(first + CHUNK, iload64(t + W.HIGH)))
        istore64(t + W.INDEX, index)
        istore64(t + W.CHUNKS, chunks)
        istore64(t + W.FIRST_ROW, first_row)

    @_jit
    def describe(p, t, item):
        r, kv_heads = find_request(p, item), iload64(p + A.NUM_KV_HEADS)
        prefix, requests = iload64(p + A.PREFIX), iload64(p + A.NUM_REQUESTS)
        first, stop = iload64(prefix + 8 * r), iload64(prefix + 8 * r + 8)
        partial = prefix + 8 * (requests + 1) + 8 * r
        first_row, stop_row = iload64(partial), iload64(partial + 8)
        at, heads = iload64(p + A.QUERY_START) + 4 * r, 1
        if iload64(p + A.ALL_HEADS) and iload32(at + 4) - iload32(at) == 1:
            heads, kv_heads = kv_heads, 1
        # Heads of the same pages one after the other.
        item, per_head = item - first, div(stop - first, kv_heads)
        part = div(item, kv_heads)
        kv_head = item - part * kv_heads
        if stop_row > first_row:
            set_rows(p, t, r, kv_head, heads, 0)
            set_chunk(t, part, per_head, first_row)
        else:  # the last tile sees the most keys: longest work first
            set_rows(p, t, r, kv_head, heads, per_head - 1 - part)

    return describe

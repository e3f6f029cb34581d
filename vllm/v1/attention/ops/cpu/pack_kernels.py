# SPDX-License-Identifier: Apache-2.0
"""Copies of queries, keys and values in the layout of gemm.py's tiles, for attention_kernels.py.
Numba code.
"""

from __future__ import annotations

from numba import njit, types

from vllm.model_executor.layers.cpu_ops.simd import I64, Simd, _none, const, make_intrinsic
from vllm.model_executor.layers.cpu_ops.simd import load as emit_vector_load
from vllm.model_executor.layers.cpu_ops.simd import store as emit_vector_store

from . import attend_args as A
from . import thread_record as W
from .tile_sizes import BLOCK

_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_pack_keys(simd: Simd, tail: bool):
    """Intrinsic (rows, offset, out, out_stride, count): a square of K, transposed.

    `rows`: address of `lanes` row addresses; `offset`: bytes into each row. A row gives `lanes`
    words: float32 values, or bfloat16 pairs. Without pair mode, pairs are widened to two float32
    output rows. `count` words are read if `tail`.
    """
    e = simd.emit
    bf16 = simd.dtype == "bfloat16"
    word, suffix = (e.i32, "i32") if bf16 else simd.storage()

    def emit(b, rows, offset, out, out_stride, count):
        vectors = []
        for i in range(e.lanes):
            row = b.add(emit_vector_load(b, b.add(rows, const(I64, 8 * i)), I64, 8), offset)
            raw = (
                e.load_tail(b, row, word, suffix, count)
                if tail
                else emit_vector_load(b, row, word, simd.itemsize)
            )
            vectors.append(raw if bf16 else simd.emit_widen(b, raw))
        columns = e.transpose(b, vectors)
        if bf16 and not simd.pairs:
            low = [b.shl(c, const(e.i32, 16)) for c in columns]
            high = [b.and_(c, const(e.i32, -65536)) for c in columns]
            columns = [v for both in zip(low, high, strict=True) for v in both]
        for i, column in enumerate(columns):
            emit_vector_store(b, column, b.add(out, b.mul(out_stride, const(I64, i))), 4)
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(i64, i64, i64, i64, i64), emit)


def make_pack_value_pair(simd: Simd, tail: bool):
    """Intrinsic (row0, row1, out, count): words of two bfloat16, one from each row of V."""
    e = simd.emit

    def emit(b, row0, row1, out, count):
        halves = []
        for row in (row0, row1):
            raw = (
                e.load_tail(b, row, e.i16, "i16", count)
                if tail
                else emit_vector_load(b, row, e.i16, 2)
            )
            halves.append(b.zext(raw, e.i32))
        word = b.or_(halves[0], b.shl(halves[1], const(e.i32, 16)))
        emit_vector_store(b, word, out, 4)
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(i64, i64, i64, i64), emit)


def make_pack_queries(simd: Simd):
    """pack_queries(p, w): the tile's rows of Q, one below the other."""
    iload64, div, lanes, itemsize, pairs = (
        simd.iload64,
        simd.div,
        simd.lanes,
        simd.itemsize,
        simd.pairs,
    )
    load, load_tail, fstore = simd.load, simd.load_tail, simd.fstore
    store, store_tail = simd.store, simd.store_tail

    @_jit
    def pack_query_row(source, out, head_size):
        full = div(head_size, lanes) * lanes
        for d in range(0, full, lanes):
            if pairs:  # as they are: two bfloat16 a word
                store(out + 2 * d, load(source + 2 * d))
            else:
                fstore(out + 4 * d, load(source + itemsize * d))
        if full < head_size:
            tail = load_tail(source + itemsize * full, head_size - full)
            if pairs:
                store_tail(out + 2 * full, tail, head_size - full)
            else:
                fstore(out + 4 * full, tail)

    @_jit
    def pack_queries(p, w):
        heads, out = iload64(p + A.GROUP), iload64(w + W.Q)
        token_stride, head_stride = iload64(p + A.Q_TOKEN), iload64(p + A.Q_HEAD)
        head_size, out_stride = iload64(p + A.HEAD_SIZE), 4 * iload64(w + W.PADDED_K)
        base = iload64(p + A.Q) + iload64(w + W.FIRST_TOKEN) * token_stride
        base += iload64(w + W.KV_HEAD) * heads * head_stride
        for t in range(iload64(w + W.TOKENS)):
            for g in range(heads * iload64(w + W.HEADS)):
                pack_query_row(base + t * token_stride + g * head_stride, out, head_size)
                out += out_stride

    return pack_queries


def make_locate(simd: Simd):
    """locate(p, w, t, head, first, half): addresses of the rows of tile t's block; fetch(p, w, at, count):
    asks for some of them.
    """
    iload64, istore64, iload32, div = simd.iload64, simd.istore64, simd.iload32, simd.div
    itemsize, prefetch = simd.itemsize, simd.prefetch

    @_jit
    def locate_page(p, t, head, k_out, v_out, first, column, slot, stop):
        """Row addresses of keys [first, stop) that lie in one page, from its slot `slot` on."""
        table = iload64(p + A.BLOCK_TABLE) + iload64(t + W.REQUEST) * iload64(p + A.TABLE_STRIDE)
        block = iload32(table + 4 * column)
        k_token, v_token = iload64(p + A.K_TOKEN), iload64(p + A.V_TOKEN)
        k = (
            iload64(p + A.K)
            + head * iload64(p + A.K_HEAD)
            + block * iload64(p + A.K_BLOCK)
            + slot * k_token
        )
        v = (
            iload64(p + A.V)
            + head * iload64(p + A.V_HEAD)
            + block * iload64(p + A.V_BLOCK)
            + slot * v_token
        )
        for j in range(stop - first):
            istore64(k_out + 8 * j, k + j * k_token)
            istore64(v_out + 8 * j, v + j * v_token)

    @_jit
    def locate(p, w, t, head, first, half):
        """Row addresses of the BLOCK keys from `first` of KV head `head`, in the half of the tables at byte `half`;
        zeros outside [LOW, HIGH).
        """
        zeros, size = iload64(w + W.ZEROS), iload64(p + A.TOKENS_PER_BLOCK)
        k_rows, v_rows = iload64(w + W.K_ROWS) + half, iload64(w + W.V_ROWS) + half
        start, stop = max(iload64(t + W.LOW), first), min(iload64(t + W.HIGH), first + BLOCK)
        if stop - start < BLOCK:
            for j in range(BLOCK):
                istore64(k_rows + 8 * j, zeros)
                istore64(v_rows + 8 * j, zeros)
        while start < stop:
            column = div(start, size)
            slot = start - column * size
            end = min(stop, start - slot + size)
            at = 8 * (start - first)
            locate_page(p, t, head, k_rows + at, v_rows + at, start, column, slot, end)
            start = end

    @_jit
    def fetch(p, w, at, count):
        """Asks for `count` keys and values from byte `at` of the address tables, in the order in
        which they lie in memory.
        """
        k_rows, v_rows, row_bytes = (
            iload64(w + W.K_ROWS) + at,
            iload64(w + W.V_ROWS) + at,
            iload64(p + A.HEAD_SIZE) * itemsize,
        )
        for j in range(count):
            k, v = iload64(k_rows + 8 * j), iload64(v_rows + 8 * j)
            for offset in range(0, row_bytes, 64):
                prefetch(k + offset)
            for offset in range(0, row_bytes, 64):
                prefetch(v + offset)

    return locate, fetch


def make_pack_rows(simd: Simd):
    """pack_keys(p, w, half, j): `lanes` keys of a block from its j-th, transposed; pack_values(p, w,
    half, count): its values copied; both into the tiles' layout, by the addresses in `half` of the
    tables.
    """
    iload64, div, pairs, lanes, itemsize = (
        simd.iload64,
        simd.div,
        simd.pairs,
        simd.lanes,
        simd.itemsize,
    )
    load, load_tail, fstore = simd.load, simd.load_tail, simd.fstore
    word_bytes = 4 if simd.dtype == "bfloat16" else itemsize
    square, square_tail = make_pack_keys(simd, False), make_pack_keys(simd, True)
    pair, pair_tail = make_pack_value_pair(simd, False), make_pack_value_pair(simd, True)
    elements_per_word, rows_per_step = word_bytes // itemsize, 2 if pairs else 1
    out_rows = lanes * (2 if elements_per_word == 2 and not pairs else 1)

    @_jit
    def pack_keys(p, w, half, j):
        rows, column = iload64(w + W.K_ROWS) + half + 8 * j, iload64(w + W.K) + 4 * j
        words = div(iload64(p + A.HEAD_SIZE), elements_per_word)
        full = div(words, lanes) * lanes
        for d in range(0, full, lanes):
            square(rows, d * word_bytes, column, 4 * BLOCK, 0)
            column += 4 * BLOCK * out_rows
        if full < words:
            square_tail(rows, full * word_bytes, column, 4 * BLOCK, words - full)

    @_jit
    def pack_values(p, w, half, count):
        v_rows, out, head_size = iload64(w + W.V_ROWS) + half, iload64(w + W.V), iload64(p + A.HEAD_SIZE)
        out_stride, full = 4 * iload64(w + W.PADDED_V), div(head_size, lanes) * lanes
        for j in range(0, count, rows_per_step):
            row = iload64(v_rows + 8 * j)
            if pairs:
                row1 = iload64(v_rows + 8 * j + 8)
                for d in range(0, full, lanes):
                    pair(row + 2 * d, row1 + 2 * d, out + 4 * d, 0)
                if full < head_size:
                    pair_tail(row + 2 * full, row1 + 2 * full, out + 4 * full, head_size - full)
            else:
                for d in range(0, full, lanes):
                    fstore(out + 4 * d, load(row + itemsize * d))
                if full < head_size:
                    fstore(out + 4 * full, load_tail(row + itemsize * full, head_size - full))
            out += out_stride

    return pack_keys, pack_values

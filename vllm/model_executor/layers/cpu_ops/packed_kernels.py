# SPDX-License-Identifier: Apache-2.0
"""Matrix products with packed bfloat16 weights, for any number of rows. Numba code.

A *panel* is PANEL outputs of all inputs, laid out in the order in which a tile reads it:

    word (4 bytes): inputs 2 k and 2 k + 1 of one output
    panel: for k in 0 .. K / 2: the words of outputs 0 .. PANEL - 1

so that one row of x streams the weights from end to end, and many rows find a panel in the L2
cache. A tile holds `rows` x PANEL sums in registers; a sum is one chain over k whatever the tile,
so its bits do not depend on how many rows are computed together.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from . import op_args as A
from .gemm import multiply_add
from .panel_sizes import MAX_ROWS, PANEL
from .rows import each_range, each_share, jit
from .simd import I32, I64, Simd, _none, const, load, make_intrinsic

# How far ahead a panel is asked for: what passes while memory answers, the longer the more rows.
_AHEAD_BYTES, _AHEAD_BYTES_ROWS, _ROWS = 2048, 8192, 5


def make_packed_tile(simd: Simd, rows: int) -> Callable:
    """Intrinsic tile(a, lda, panel, out, ldo, bias, k): out[i, n] = dot(a[i], panel[n]) + bias[n]
    for `rows` rows; strides in bytes, k in words; a panel's bias is PANEL values.
    """
    e, madd = simd.emit, multiply_add(simd, True)
    vectors, width = PANEL // e.lanes, 4 * e.lanes
    cells = [(i, j) for i in range(rows) for j in range(vectors)]
    ahead = _AHEAD_BYTES if rows < _ROWS else _AHEAD_BYTES_ROWS

    def step(b, acc, a_rows, panel, index):
        line = b.add(panel, b.mul(index, const(I64, vectors * width)))
        for j in range(vectors):
            simd.emit_prefetch(b, b.add(line, const(I64, ahead + j * width)))
        columns = [load(b, b.add(line, const(I64, j * width)), e.i32, 4) for j in range(vectors)]
        offset, new = b.mul(index, const(I64, 4)), {}
        for i in range(rows):
            word = e.splat(b, load(b, b.add(a_rows[i], offset), I32, 2))
            for j in range(vectors):
                new[i, j] = madd(b, acc[i, j], word, columns[j])
        return new

    def emit(b: ir.IRBuilder, a, lda, panel, out, ldo, bias, k):
        a_rows = [b.add(a, b.mul(lda, const(I64, i))) for i in range(rows)]
        entry, loop = b.block, b.append_basic_block("packed.loop")
        done = b.append_basic_block("packed.done")
        b.branch(loop)
        b.position_at_end(loop)
        index, acc = b.phi(I64), {cell: b.phi(e.f32) for cell in cells}
        new = step(b, acc, a_rows, panel, index)
        following = b.add(index, const(I64, 1))
        index.add_incoming(const(I64, 0), entry)
        index.add_incoming(following, loop)
        for cell in cells:
            acc[cell].add_incoming(const(e.f32, 0.0), entry)
            acc[cell].add_incoming(new[cell], loop)
        b.cbranch(b.icmp_signed("<", following, k), loop, done)
        b.position_at_end(done)
        shifts = [
            simd.emit_load(b, b.add(bias, const(I64, j * e.lanes * simd.itemsize)))
            for j in range(vectors)
        ]
        for i, j in cells:
            row = b.add(out, b.mul(ldo, const(I64, i)))
            at = b.add(row, const(I64, j * e.lanes * simd.itemsize))
            simd.emit_store(b, at, b.fadd(new[i, j], shifts[j]))
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(*[i64] * 7), emit)


def make_packed_gemm(simd: Simd) -> Callable:
    """out = x W^T + bias; an item is a panel and up to MAX_ROWS rows."""
    iload64, div = simd.iload64, simd.div
    tile12, tile11, tile10, tile9 = (make_packed_tile(simd, rows) for rows in (12, 11, 10, 9))
    tile8, tile7, tile6, tile5 = (make_packed_tile(simd, rows) for rows in (8, 7, 6, 5))
    tile4, tile3, tile2, tile1 = (make_packed_tile(simd, rows) for rows in (4, 3, 2, 1))

    @jit
    def large(rows, a, lda, panel, out, ldo, bias, k):
        if rows == 12:
            tile12(a, lda, panel, out, ldo, bias, k)
        elif rows == 11:
            tile11(a, lda, panel, out, ldo, bias, k)
        elif rows == 10:
            tile10(a, lda, panel, out, ldo, bias, k)
        elif rows == 9:
            tile9(a, lda, panel, out, ldo, bias, k)
        elif rows == 8:
            tile8(a, lda, panel, out, ldo, bias, k)
        else:
            tile7(a, lda, panel, out, ldo, bias, k)

    @jit
    def small(rows, a, lda, panel, out, ldo, bias, k):
        if rows == 1:
            tile1(a, lda, panel, out, ldo, bias, k)
        elif rows == 2:
            tile2(a, lda, panel, out, ldo, bias, k)
        elif rows == 3:
            tile3(a, lda, panel, out, ldo, bias, k)
        elif rows == 4:
            tile4(a, lda, panel, out, ldo, bias, k)
        elif rows == 5:
            tile5(a, lda, panel, out, ldo, bias, k)
        else:
            tile6(a, lda, panel, out, ldo, bias, k)

    @jit
    def panel_product(p, first_row, rows, panel):
        """Rows in parts as equal as may be, each of at most 12."""
        lda, ldo = iload64(p + A.PACKED_X_ROW), iload64(p + A.PACKED_OUT_ROW)
        k = iload64(p + A.PACKED_K)
        weights = iload64(p + A.PACKED_W) + panel * iload64(p + A.PACKED_PANEL)
        a = iload64(p + A.PACKED_X) + first_row * lda
        out = iload64(p + A.PACKED_OUT) + first_row * ldo + panel * (2 * PANEL)
        bias = iload64(p + A.PACKED_BIAS) + panel * iload64(p + A.PACKED_BIAS_PANEL)
        left = div(rows + 11, 12)
        while left > 0:
            part = div(rows + left - 1, left)
            if part <= 6:
                small(part, a, lda, weights, out, ldo, bias, k)
            else:
                large(part, a, lda, weights, out, ldo, bias, k)
            a, out, rows, left = a + part * lda, out + part * ldo, rows - part, left - 1

    @jit
    def body(p, first, stop):
        panels, m = iload64(p + A.PACKED_PANELS), iload64(p + A.PACKED_M)
        for item in range(first, stop):
            block = div(item, panels)
            row = block * MAX_ROWS
            panel_product(p, row, min(MAX_ROWS, m - row), item - block * panels)

    return each_share(simd, body)


def make_embedding(simd: Simd) -> Callable:
    """out[i] = row ids[i] of a table, plain or packed; ids int32."""
    iload64, iload32, istore32, copy, div = (
        simd.iload64,
        simd.iload32,
        simd.istore32,
        simd.copy,
        simd.div,
    )
    as_word = make_intrinsic(
        types.int32(types.int64), lambda b, address: load(b, address, I32, 2)
    )

    @jit
    def body(p, first, stop):
        table, row_bytes = iload64(p + A.EMBED_TABLE), iload64(p + A.EMBED_ROW_BYTES)
        panel_bytes = iload64(p + A.EMBED_PANEL_BYTES)
        for i in range(first, stop):
            token = iload32(iload64(p + A.EMBED_IDS) + 4 * i)
            out = iload64(p + A.EMBED_OUT) + i * row_bytes
            if panel_bytes == 0:
                copy(out, table + token * row_bytes, row_bytes)
            else:
                panel = div(token, PANEL)
                word = table + panel * panel_bytes + 4 * (token - panel * PANEL)
                for at in range(0, row_bytes, 4):
                    istore32(out + at, as_word(word))
                    word += 4 * PANEL

    return each_range(simd, body)

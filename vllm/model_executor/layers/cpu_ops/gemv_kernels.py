# SPDX-License-Identifier: Apache-2.0
"""Matrix products with few rows of x, which wait for memory: each weight is read once, in order. Numba code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from . import op_args as A
from .gemm import multiply_add
from .rows import each_range, jit
from .simd import I64, Simd, _none, const, load, make_intrinsic, store

ZERO = np.float32(0)
TILE = 4  # rows of W at a time


def make_dot_tile(simd: Simd, rows: int, columns: int) -> Callable:
    """Intrinsic (w, w_row, x, x_row, sums, k): sums[j * rows + i] = dot(w[i], x[j]), float32; strides in bytes."""
    e, pairs, size = simd.emit, simd.pairs, simd.itemsize
    madd = multiply_add(simd, True) if pairs else (lambda b, acc, x, y: e.fma(b, x, y, acc))
    step = e.lanes * (2 if pairs else 1)

    def fetch(b, address, count):
        if not pairs:
            return simd.emit_load(b, address, count)
        if count is None:
            return load(b, address, e.i32, 2)
        return e.load_tail(b, address, e.i32, "i32", b.lshr(count, const(I64, 1)))

    def accumulate(b, acc, w, w_row, x, x_row, offset, count):
        def at(base, stride, i):
            return b.add(b.add(base, b.mul(stride, const(I64, i))), offset)

        weights = [fetch(b, at(w, w_row, i), count) for i in range(rows)]
        inputs = [fetch(b, at(x, x_row, j), count) for j in range(columns)]
        return {(i, j): madd(b, acc[i, j], weights[i], inputs[j]) for i, j in acc}

    def emit(b: ir.IRBuilder, w, w_row, x, x_row, sums, k):
        cells = [(i, j) for j in range(columns) for i in range(rows)]
        zero, full = const(e.f32, 0.0), b.mul(b.udiv(k, const(I64, step)), const(I64, step))
        entry, loop, after = b.block, b.append_basic_block("dot.loop"), b.append_basic_block("dot.after")
        rest, done = b.append_basic_block("dot.rest"), b.append_basic_block("dot.done")
        b.cbranch(b.icmp_signed(">", full, const(I64, 0)), loop, after)
        b.position_at_end(loop)
        index, acc = b.phi(I64), {cell: b.phi(e.f32) for cell in cells}
        new = accumulate(b, acc, w, w_row, x, x_row, b.mul(index, const(I64, size)), None)
        following = b.add(index, const(I64, step))
        b.cbranch(b.icmp_signed("<", following, full), loop, after)
        index.add_incoming(const(I64, 0), entry)
        index.add_incoming(following, loop)
        b.position_at_end(after)
        totals = {}
        for cell in cells:
            acc[cell].add_incoming(zero, entry)
            acc[cell].add_incoming(new[cell], loop)
            totals[cell] = b.phi(e.f32)
            totals[cell].add_incoming(zero, entry)
            totals[cell].add_incoming(new[cell], loop)
        b.cbranch(b.icmp_signed("<", full, k), rest, done)
        b.position_at_end(rest)
        edge = accumulate(b, totals, w, w_row, x, x_row, b.mul(full, const(I64, size)), b.sub(k, full))
        b.branch(done)
        b.position_at_end(done)
        final = {cell: b.phi(e.f32) for cell in cells}
        for n, cell in enumerate(cells):
            final[cell].add_incoming(totals[cell], after)
            final[cell].add_incoming(edge[cell], rest)
        for n, cell in enumerate(cells):
            total = e.reduce(b, final[cell], lambda b, p, q: b.fadd(p, q))
            store(b, total, b.add(sums, const(I64, 4 * n)), 4)
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(*[i64] * 6), emit)


def make_gemv(simd: Simd) -> Callable:
    """out[m, n] = dot(x[m], w[n]) + bias[n] for a range of n, all m; every sum in the same order for every m and range."""
    iload64, fload1, load1, store1, stack = simd.iload64, simd.fload1, simd.load1, simd.store1, simd.stack
    itemsize = simd.itemsize
    tiles = {(r, c): make_dot_tile(simd, r, c) for r in (TILE, 1) for c in (4, 1)}
    tall4, tall1, row4, row1 = tiles[TILE, 4], tiles[TILE, 1], tiles[1, 4], tiles[1, 1]

    @jit
    def put(p, sums, m, n, rows, columns):
        bias, out = iload64(p + A.GEMV_BIAS), iload64(p + A.GEMV_OUT) + itemsize * n
        for j in range(columns):
            to = out + (m + j) * iload64(p + A.GEMV_OUT_ROW)
            for i in range(rows):
                shift = load1(bias + itemsize * (n + i)) if bias else ZERO
                store1(to + itemsize * i, fload1(sums + 4 * (j * rows + i)) + shift)

    @jit
    def tile(p, sums, n, rows):
        w_row, x_row, k = iload64(p + A.GEMV_W_ROW), iload64(p + A.GEMV_X_ROW), iload64(p + A.GEMV_K)
        w, m, count = iload64(p + A.GEMV_W) + n * w_row, 0, iload64(p + A.GEMV_M)
        while m < count:
            x = iload64(p + A.GEMV_X) + m * x_row
            columns = 4 if count - m >= 4 else 1
            if columns == 4:
                if rows == TILE:
                    tall4(w, w_row, x, x_row, sums, k)
                else:
                    row4(w, w_row, x, x_row, sums, k)
            elif rows == TILE:
                tall1(w, w_row, x, x_row, sums, k)
            else:
                row1(w, w_row, x, x_row, sums, k)
            put(p, sums, m, n, rows, columns)
            m += columns

    @jit
    def body(p, first, stop):
        sums, n = stack(), first
        while n < stop:
            rows = TILE if stop - n >= TILE else 1
            tile(p, sums, n, rows)
            n += rows

    return each_range(simd, body)

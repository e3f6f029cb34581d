# SPDX-License-Identifier: Apache-2.0
"""Matrix products with few rows of x, which wait for memory: each weight is read once, in order.
Numba code.
"""

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
UNROLL = 4  # vectors of a row in flight; each sums into an accumulator of its own


def make_dot(simd: Simd, columns: int) -> Callable:
    """Intrinsic (w, x, x_row, sums, k): sums[j] = dot(w, x[j]) for `columns` rows of x, float32;
    x_row in bytes.

    A row of W is read from end to end: the hardware prefetches one long stream far better than
    several short ones.
    """
    e, pairs, size = simd.emit, simd.pairs, simd.itemsize
    madd = multiply_add(simd, True) if pairs else (lambda b, acc, x, y: e.fma(b, x, y, acc))
    lane_values = e.lanes * (2 if pairs else 1)
    step = UNROLL * lane_values
    cells = [(u, j) for u in range(UNROLL) for j in range(columns)]

    def fetch(b, address, count):
        if not pairs:
            return simd.emit_load(b, address, count)
        if count is None:
            return load(b, address, e.i32, 2)
        return e.load_tail(b, address, e.i32, "i32", b.ashr(count, const(I64, 1)))

    def accumulate(b, acc, w, x, x_row, first, rest):
        """One step from value `first`; `rest` values are left where that is less than a step,
        else None.
        """
        new = {}
        for u in range(UNROLL):
            offset = b.mul(b.add(first, const(I64, u * lane_values)), const(I64, size))
            count = None if rest is None else b.sub(rest, const(I64, u * lane_values))
            weight = fetch(b, b.add(w, offset), count)
            for j in range(columns):
                row = b.add(x, b.mul(x_row, const(I64, j)))
                new[u, j] = madd(b, acc[u, j], weight, fetch(b, b.add(row, offset), count))
        return new

    def emit(b: ir.IRBuilder, w, x, x_row, sums, k):
        zero, full = const(e.f32, 0.0), b.mul(b.udiv(k, const(I64, step)), const(I64, step))
        entry, loop, after = (
            b.block,
            b.append_basic_block("dot.loop"),
            b.append_basic_block("dot.after"),
        )
        rest, done = b.append_basic_block("dot.rest"), b.append_basic_block("dot.done")
        b.cbranch(b.icmp_signed(">", full, const(I64, 0)), loop, after)
        b.position_at_end(loop)
        index, acc = b.phi(I64), {cell: b.phi(e.f32) for cell in cells}
        new = accumulate(b, acc, w, x, x_row, index, None)
        following = b.add(index, const(I64, step))
        b.cbranch(b.icmp_signed("<", following, full), loop, after)
        _incoming(index, (const(I64, 0), entry), (following, loop))
        b.position_at_end(after)
        totals = {cell: b.phi(e.f32) for cell in cells}
        for cell in cells:
            _incoming(acc[cell], (zero, entry), (new[cell], loop))
            _incoming(totals[cell], (zero, entry), (new[cell], loop))
        b.cbranch(b.icmp_signed("<", full, k), rest, done)
        b.position_at_end(rest)
        edge = accumulate(b, totals, w, x, x_row, full, b.sub(k, full))
        b.branch(done)
        b.position_at_end(done)
        final = {cell: b.phi(e.f32) for cell in cells}
        for cell in cells:
            _incoming(final[cell], (totals[cell], after), (edge[cell], rest))
        for j in range(columns):
            total = final[0, j]
            for u in range(1, UNROLL):
                total = b.fadd(total, final[u, j])
            store(
                b,
                e.reduce(b, total, lambda b, p, q: b.fadd(p, q)),
                b.add(sums, const(I64, 4 * j)),
                4,
            )
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(*[i64] * 5), emit)


def _incoming(phi: ir.PhiInstr, *pairs: tuple[ir.Value, ir.Block]) -> None:
    for value, block in pairs:
        phi.add_incoming(value, block)


def make_gemv(simd: Simd) -> Callable:
    """out[m, n] = dot(x[m], w[n]) + bias[n] for a range of n, all m; every sum in the same order
    for every m and range.
    """
    iload64, fload1, load1, store1, stack = (
        simd.iload64,
        simd.fload1,
        simd.load1,
        simd.store1,
        simd.stack,
    )
    itemsize, dot4, dot2, dot1 = (
        simd.itemsize,
        make_dot(simd, 4),
        make_dot(simd, 2),
        make_dot(simd, 1),
    )

    @jit
    def row(p, sums, n):
        x_row, out_row, k = (
            iload64(p + A.GEMV_X_ROW),
            iload64(p + A.GEMV_OUT_ROW),
            iload64(p + A.GEMV_K),
        )
        w, m, count = (
            iload64(p + A.GEMV_W) + n * iload64(p + A.GEMV_W_ROW),
            0,
            iload64(p + A.GEMV_M),
        )
        bias, out = iload64(p + A.GEMV_BIAS), iload64(p + A.GEMV_OUT) + itemsize * n
        shift = load1(bias + itemsize * n) if bias else ZERO
        while m < count:
            x, columns = (
                iload64(p + A.GEMV_X) + m * x_row,
                4 if count - m >= 4 else 2 if count - m >= 2 else 1,
            )
            if columns == 4:
                dot4(w, x, x_row, sums, k)
            elif columns == 2:
                dot2(w, x, x_row, sums, k)
            else:
                dot1(w, x, x_row, sums, k)
            for j in range(columns):
                store1(out + (m + j) * out_row, fload1(sums + 4 * j) + shift)
            m += columns

    @jit
    def body(p, first, stop):
        sums = stack()
        for n in range(first, stop):
            row(p, sums, n)

    return each_range(simd, body)

# SPDX-License-Identifier: Apache-2.0
"""Small matrix tiles held in registers: C[m, n] += A[m, k] B[k, n].

A is read as broadcast 4-byte words, B as rows of vectors, C is float32. A word of A and a lane of
B hold one float32, or, in pair mode, two bfloat16 along k (AVX512_BF16 multiplies and adds both
in one instruction). Each element of C is its own chain of operations along k, so its bits do not
depend on the shape of the tile it was computed in.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import njit, types

from .simd import I32, I64, BFloatType, Simd, _none, call, const, load, make_intrinsic, store


def multiply_add(simd: Simd, pairs: bool) -> Callable:
    """`f(builder, acc, a, b)` on int32 vectors a, b and a float32 vector acc."""
    e = simd.emit
    if not pairs:
        return lambda b, acc, x, y: e.fma(b, b.bitcast(x, e.f32), b.bitcast(y, e.f32), acc)
    bf16 = ir.VectorType(BFloatType(), 2 * e.lanes)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * e.lanes}"
    return lambda b, acc, x, y: call(b, name, e.f32, acc, b.bitcast(x, bf16), b.bitcast(y, bf16))


def make_tile(simd: Simd, rows: int, vectors: int, pairs: bool) -> Callable:
    """Intrinsic tile(a, lda, b, ldb, c, ldc, k, accumulate): strides in bytes, k in words;
    accumulate 0 starts from zero.
    """
    e, madd = simd.emit, multiply_add(simd, pairs)
    width = 4 * e.lanes

    def emit(b, a, lda, bm, ldb, c, ldc, k, accumulate):
        c_rows = [b.add(c, b.mul(ldc, const(I64, i))) for i in range(rows)]
        a_rows = [b.add(a, b.mul(lda, const(I64, i))) for i in range(rows)]
        keep = b.icmp_signed("!=", accumulate, const(I64, 0))
        cells = [(i, j) for i in range(rows) for j in range(vectors)]
        start = {}
        for i, j in cells:
            old = load(b, b.add(c_rows[i], const(I64, j * width)), e.f32, 4)
            start[i, j] = b.select(keep, old, const(e.f32, 0.0))
        entry, loop = b.block, b.append_basic_block("tile.loop")
        done = b.append_basic_block("tile.done")
        b.cbranch(b.icmp_signed(">", k, const(I64, 0)), loop, done)
        b.position_at_end(loop)
        step, acc = b.phi(I64), {cell: b.phi(e.f32) for cell in cells}
        b_row = b.add(bm, b.mul(step, ldb))
        columns = [load(b, b.add(b_row, const(I64, j * width)), e.i32, 4) for j in range(vectors)]
        offset, new = b.mul(step, const(I64, 4)), {}
        for i in range(rows):
            word = e.splat(b, load(b, b.add(a_rows[i], offset), I32, 4))
            for j in range(vectors):
                new[i, j] = madd(b, acc[i, j], word, columns[j])
        next_step = b.add(step, const(I64, 1))
        step.add_incoming(const(I64, 0), entry)
        step.add_incoming(next_step, loop)
        b.cbranch(b.icmp_signed("<", next_step, k), loop, done)
        b.position_at_end(done)
        for i, j in cells:
            acc[i, j].add_incoming(start[i, j], entry)
            acc[i, j].add_incoming(new[i, j], loop)
            result = b.phi(e.f32)
            result.add_incoming(start[i, j], entry)
            result.add_incoming(new[i, j], loop)
            start[i, j] = result
        for i, j in cells:
            store(b, start[i, j], b.add(c_rows[i], const(I64, j * width)), 4)
        return _none(b)

    i64 = types.int64
    return make_intrinsic(types.void(*[i64] * 8), emit)


def make_gemm(simd: Simd, pairs: bool) -> Callable:
    """gemm(a, lda, b, ldb, c, ldc, m, n_vectors, k, accumulate) over tiles; strides in bytes, k
    in words.
    """
    wide = 4 if simd.lanes == 16 else 2
    tile4, tile3, tile2, tile1 = (make_tile(simd, rows, wide, pairs) for rows in (4, 3, 2, 1))
    edge4, edge1 = make_tile(simd, 4, 1, pairs), make_tile(simd, 1, 1, pairs)
    width = 4 * simd.lanes

    @njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def column(a, lda, b, ldb, c, ldc, m, k, accumulate):
        i = 0
        while m - i >= 4:
            tile4(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, accumulate)
            i += 4
        a, c = a + i * lda, c + i * ldc
        if m - i == 3:
            tile3(a, lda, b, ldb, c, ldc, k, accumulate)
        elif m - i == 2:
            tile2(a, lda, b, ldb, c, ldc, k, accumulate)
        elif m - i == 1:
            tile1(a, lda, b, ldb, c, ldc, k, accumulate)

    @njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def edge(a, lda, b, ldb, c, ldc, m, k, accumulate):
        i = 0
        while i < m:
            if m - i >= 4:
                edge4(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, accumulate)
                i += 4
            else:
                edge1(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, accumulate)
                i += 1

    @njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def gemm(a, lda, b, ldb, c, ldc, m, n_vectors, k, accumulate):
        j = 0
        while n_vectors - j >= wide:
            column(a, lda, b + j * width, ldb, c + j * width, ldc, m, k, accumulate)
            j += wide
        while j < n_vectors:
            edge(a, lda, b + j * width, ldb, c + j * width, ldc, m, k, accumulate)
            j += 1

    return gemm

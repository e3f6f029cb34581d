# SPDX-License-Identifier: Apache-2.0
"""Attention of a few query rows, as single tokens have: keys and values from where they lie, without
copies. Numba code, for CPUs that multiply bfloat16 pairs.

    16 keys, 32 values of each      turned in registers       words of Q, one after the other
    | k0: 0 1 2 3 ... |             | k0 01 | k1 01 | ... |   S += | q 01 | q 01 | ... | times it
    | k1: 0 1 2 3 ... |      ->     | k0 23 | k1 23 | ... |
    2 values of V, interleaved: | v0 0 | v1 0 | v0 1 | v1 1 | ... |   acc += | p 01 | p 01 | ... | times it

A sum has the order that gemm.py's tiles give it over packed copies, so its bits are the same.

Memory is to work all the time, and drops what it is asked for faster than it gives. So lines of the
next block are asked for one by one: values while scores are computed, keys while values are summed,
and softmax, which asks for nothing, begins with some keys on their way.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import njit, types

from vllm.model_executor.layers.cpu_ops.gemm import multiply_add
from vllm.model_executor.layers.cpu_ops.simd import (
    I32,
    I64,
    Simd,
    _none,
    const,
    load,
    make_intrinsic,
    store,
)

from . import attend_args as A
from . import thread_record as W
from .tile_sizes import BLOCK, NARROW_ROWS, NARROW_VALUES

_GROUPS = NARROW_VALUES // 32  # two vectors of words each
_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _loop(b: ir.IRBuilder, name: str, count: ir.Value, start: list, step: Callable) -> list:
    """Emits `for index in range(count): state = step(index, state)`, count at least 1."""
    entry, loop, done = b.block, b.append_basic_block(name), b.append_basic_block(f"{name}.done")
    b.branch(loop)
    b.position_at_end(loop)
    index, state = b.phi(I64), [b.phi(value.type) for value in start]
    new, following = step(index, state), b.add(index, const(I64, 1))
    for phi, first, last in zip([index, *state], [const(I64, 0), *start], [following, *new]):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return new


def make_scores_tile(simd: Simd, rows: int) -> Callable:
    """Intrinsic (k_rows, asked, q, q_stride, s, s_stride, squares): `lanes` scores of each of `rows`
    rows of Q. `k_rows`: address of `lanes` row addresses; a square is `lanes` words of every row.
    With each it asks for as much of the rows in the table `asked`.
    """
    e, madd = simd.emit, multiply_add(simd, True)

    def emit(b, k_rows, asked, q, q_stride, s, s_stride, squares):
        keys = [load(b, b.add(k_rows, const(I64, 8 * i)), I64, 8) for i in range(e.lanes)]
        q_rows = [b.add(q, b.mul(q_stride, const(I64, i))) for i in range(rows)]

        def step(index, acc):
            offset = b.mul(index, const(I64, 4 * e.lanes))
            columns = e.transpose(b, [load(b, b.add(key, offset), e.i32, 2) for key in keys])
            for i, column in enumerate(columns):
                at = b.add(offset, const(I64, 4 * i))
                words = [e.splat(b, load(b, b.add(row, at), I32, 4)) for row in q_rows]
                acc = [madd(b, old, word, column) for old, word in zip(acc, words)]
                row = load(b, b.add(asked, const(I64, 8 * i)), I64, 8)
                simd.emit_prefetch(b, b.add(row, offset))
            return acc

        sums = _loop(b, "scores", squares, [const(e.f32, 0.0)] * rows, step)
        for i, value in enumerate(sums):
            store(b, value, b.add(s, b.mul(s_stride, const(I64, i))), 4)
        return _none(b)

    return make_intrinsic(types.void(*[types.int64] * 7), emit)


def make_values_tile(simd: Simd, rows: int) -> Callable:
    """Intrinsic (v_rows, asked, offset, p, p_stride, acc, acc_stride, pairs): acc += P V for
    NARROW_VALUES values from byte `offset` of each row of V, `pairs` pairs of keys. With each it asks
    for as much of the rows in the table `asked`.
    """
    e, madd = simd.emit, multiply_add(simd, True)
    halves = ir.VectorType(e.i16.element, 2 * e.lanes)
    quarter = e.lanes // 4

    def pair_of(b, table, index, offset):
        """Where the rows of a pair of keys begin."""
        pair = b.add(table, b.mul(index, const(I64, 16)))
        return [b.add(load(b, b.add(pair, const(I64, at)), I64, 8), offset) for at in (0, 8)]

    def mask(part: int, other: int) -> ir.Constant:
        """Quarter i of a vector, `part` of each 2 quarters of two vectors end to end."""
        lanes = [[8 * i + 4 * part + j, other + 8 * i + 4 * part + j] for i in range(quarter) for j in range(4)]
        return ir.Constant(ir.VectorType(I32, 2 * e.lanes), sum(lanes, []))

    def interleave(b, row0, row1):
        """Words of two bfloat16, one of each row: of values 0 to 3, 8 to 11, ..., and of the rest."""
        x, y = (load(b, row, halves, 2) for row in (row0, row1))
        return [
            b.bitcast(b.shuffle_vector(x, y, mask(part, 2 * e.lanes)), e.i32) for part in range(2)
        ]

    def in_halves(b, first, second):
        """Values in order to those that `interleave` gives."""
        order = [[8 * i + 4 * part + j for i in range(quarter) for j in range(4)] for part in range(2)]
        return [b.shuffle_vector(first, second, ir.Constant(e.i32, lanes)) for lanes in order]

    def in_order(b, low, high):
        places = [(8 * i + j) // 8 * 4 + j % 4 + (j // 4) * e.lanes for i in range(quarter) for j in range(8)]
        return [
            b.shuffle_vector(low, high, ir.Constant(e.i32, places[at : at + e.lanes]))
            for at in (0, e.lanes)
        ]

    def emit(b, v_rows, asked, offset, p, p_stride, acc, acc_stride, pairs):
        p_rows = [b.add(p, b.mul(p_stride, const(I64, i))) for i in range(rows)]
        places = [
            [
                b.add(b.add(acc, b.mul(acc_stride, const(I64, i))), const(I64, 4 * e.lanes * at))
                for at in range(2 * _GROUPS)
            ]
            for i in range(rows)
        ]
        start = []
        for row in places:
            old = [load(b, place, e.f32, 4) for place in row]
            for at in range(0, 2 * _GROUPS, 2):
                start += in_halves(b, *old[at : at + 2])

        def step(index, state):
            row0, row1 = pair_of(b, v_rows, index, offset)
            asked0, asked1 = pair_of(b, asked, index, offset)
            columns = []
            for group in range(_GROUPS):
                at = const(I64, 4 * e.lanes * group)
                columns += interleave(b, b.add(row0, at), b.add(row1, at))
                simd.emit_prefetch(b, b.add(asked0, at))
                simd.emit_prefetch(b, b.add(asked1, at))
            at, new = b.mul(index, const(I64, 4)), []
            for i, p_row in enumerate(p_rows):
                word = e.splat(b, load(b, b.add(p_row, at), I32, 4))
                old = state[i * len(columns) : (i + 1) * len(columns)]
                new += [madd(b, value, word, column) for value, column in zip(old, columns)]
            return new

        sums = iter(_loop(b, "values", pairs, start, step))
        for row in places:
            for at in range(0, 2 * _GROUPS, 2):
                for place, value in zip(row[at : at + 2], in_order(b, next(sums), next(sums))):
                    store(b, value, place, 4)
        return _none(b)

    return make_intrinsic(types.void(*[types.int64] * 8), emit)


def make_narrow(simd: Simd) -> tuple[Callable, Callable]:
    """scores(p, w, rows, half, other, j): `lanes` columns of S from the j-th, before softmax; values(p,
    w, rows, half, other, acc, count): acc += P V over `count` keys. Their addresses are in `half` of the
    tables, those of keys that come then in `other`.
    """
    iload64, lanes, div = simd.iload64, simd.lanes, simd.div
    scores4, scores3, scores2, scores1 = (
        make_scores_tile(simd, rows) for rows in range(NARROW_ROWS, 0, -1)
    )
    values4, values3, values2, values1 = (
        make_values_tile(simd, rows) for rows in range(NARROW_ROWS, 0, -1)
    )

    @_jit
    def scores(p, w, rows, half, other, j):
        here, asked = iload64(w + W.K_ROWS) + half + 8 * j, iload64(w + W.V_ROWS) + other + 8 * j
        q_stride = 4 * iload64(w + W.PADDED_K)
        q = iload64(w + W.Q) + iload64(w + W.HEAD) * rows * q_stride
        s, squares = iload64(w + W.S) + 4 * j, div(iload64(p + A.HEAD_SIZE), 2 * lanes)
        if rows == 1:
            scores1(here, asked, q, q_stride, s, 4 * BLOCK, squares)
        elif rows == 2:
            scores2(here, asked, q, q_stride, s, 4 * BLOCK, squares)
        elif rows == 3:
            scores3(here, asked, q, q_stride, s, 4 * BLOCK, squares)
        else:
            scores4(here, asked, q, q_stride, s, 4 * BLOCK, squares)

    @_jit
    def values(p, w, rows, half, other, acc, count):
        v, asked = iload64(w + W.V_ROWS) + half, iload64(w + W.K_ROWS) + other
        probs = iload64(w + W.P)
        stride, pairs = 4 * iload64(w + W.PADDED_V), count >> 1
        for offset in range(0, 2 * iload64(p + A.HEAD_SIZE), 2 * NARROW_VALUES):
            if rows == 1:
                values1(v, asked, offset, probs, 2 * BLOCK, acc, stride, pairs)
            elif rows == 2:
                values2(v, asked, offset, probs, 2 * BLOCK, acc, stride, pairs)
            elif rows == 3:
                values3(v, asked, offset, probs, 2 * BLOCK, acc, stride, pairs)
            else:
                values4(v, asked, offset, probs, 2 * BLOCK, acc, stride, pairs)
            acc += 4 * NARROW_VALUES

    return scores, values

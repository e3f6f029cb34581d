# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights of 8 and 4 bits, for any number of rows. Numba code.

Rows of x are quantised to int8 by groups of 32, as the weights are: codes times codes are summed as
integers (4 at once where the CPU has VNNI), and a group's sum is scaled once. Weights stay as small
as they are until they are in registers, and the same tile serves one row, which waits for memory,
and many. A sum is one chain over the groups whatever the tile, so its bits do not depend on how many
rows are computed together. The layouts are those of quant_format.py and quant_args.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import quant_args as Q
from .panel_sizes import MAX_ROWS
from .quant_format import GROUP, PANEL, QuantFormat
from .quant_simd import make_quantize_group, make_sum_of_products
from .rows import each_range, jit, make_take_share
from .simd import I32, I64, Simd, _none, const, load, make_intrinsic

_AHEAD_BYTES = 2048  # how far ahead a panel is asked for
_VECTORS = 2  # of outputs in a tile


class _Tile:
    """Emits the product of `rows` rows with one panel's outputs `column` and on."""

    def __init__(self, simd: Simd, fmt: QuantFormat, rows: int) -> None:
        self.simd, self.e, self.fmt, self.rows = simd, simd.emit, fmt, rows
        self.add_products = make_sum_of_products(simd)
        self.cells = [(i, j) for i in range(rows) for j in range(_VECTORS)]
        self.width = 4 * self.e.lanes
        self.group_bytes = PANEL * fmt.block_bytes

    def splat_at(self, b, address: ir.Value, offset: int, ty: ir.Type) -> ir.Value:
        return self.e.splat(b, load(b, b.add(address, const(I64, offset)), ty, 4))

    def halves(self, b, block: ir.Value, column: ir.Value, at: int) -> list[ir.Value]:
        """Float16 values of the tile's outputs, widened."""
        first = b.add(b.add(block, const(I64, at)), b.shl(column, const(I64, 1)))
        step = 2 * self.e.lanes
        raw = [load(b, b.add(first, const(I64, j * step)), self.e.f16, 2) for j in range(_VECTORS)]
        return [b.fpext(value, self.e.f32) for value in raw]

    def codes(self, b, block: ir.Value, column: ir.Value) -> list[list[ir.Value]]:
        """Words of codes, each code a byte: [word of 4 inputs][vector]."""
        fmt, i32 = self.fmt, self.e.i32
        first = b.add(b.add(block, const(I64, PANEL * fmt.header_bytes)), b.shl(column, const(I64, 2)))
        lines = []
        for word in range(fmt.num_words):
            line = b.add(first, const(I64, word * 4 * PANEL))
            self.simd.emit_prefetch(b, b.add(line, const(I64, _AHEAD_BYTES)))
            lines.append(
                [load(b, b.add(line, const(I64, j * self.width)), i32, 4) for j in range(_VECTORS)]
            )
        if fmt.bits == 8:
            return lines
        low = const(i32, 0x0F0F0F0F)
        below = [[b.and_(v, low) for v in line] for line in lines]
        above = [[b.and_(b.lshr(v, const(i32, 4)), low) for v in line] for line in lines]
        return below + above

    def integer_sums(self, b, x_rows, block, column) -> dict:
        """Sums over the group of code of x times code of w, its zero taken off."""
        fmt, e = self.fmt, self.e
        offset = Q.X_MINUS_128 if fmt.bits == 8 else Q.X_MINUS_8
        acc = {}
        for i, j in self.cells:
            zero = const(e.i32, 0)
            acc[i, j] = zero if fmt.has_min else self.splat_at(b, x_rows[i], offset, I32)
        for word, vectors in enumerate(self.codes(b, block, column)):
            for i in range(self.rows):
                x = self.splat_at(b, x_rows[i], 4 * word, I32)
                for j in range(_VECTORS):
                    acc[i, j] = self.add_products(b, acc[i, j], vectors[j], x)
        return acc

    def group(self, b, total: dict, x_rows, block, column) -> dict:
        """`total` and this group's part of each sum."""
        e, fmt = self.e, self.fmt
        scales = self.halves(b, block, column, 0)
        minimums = self.halves(b, block, column, 2 * PANEL) if fmt.has_min else []
        sums, new = self.integer_sums(b, x_rows, block, column), {}
        for i, j in self.cells:
            scale = b.fmul(scales[j], self.splat_at(b, x_rows[i], Q.X_SCALE, ir.FloatType()))
            new[i, j] = e.fma(b, b.sitofp(sums[i, j], e.f32), scale, total[i, j])
            if fmt.has_min:
                x_sum = self.splat_at(b, x_rows[i], Q.X_SUM, ir.FloatType())
                new[i, j] = e.fma(b, minimums[j], x_sum, new[i, j])
        return new

    def emit(self, b: ir.IRBuilder, x, x_row, panel, column, out, ldo, bias, groups):
        entry, loop = b.block, b.append_basic_block("quant.loop")
        done = b.append_basic_block("quant.done")
        b.branch(loop)
        b.position_at_end(loop)
        index, total = b.phi(I64), {cell: b.phi(self.e.f32) for cell in self.cells}
        block = b.add(panel, b.mul(index, const(I64, self.group_bytes)))
        at = b.add(x, b.mul(index, const(I64, Q.X_GROUP_BYTES)))
        x_rows = [b.add(at, b.mul(x_row, const(I64, i))) for i in range(self.rows)]
        new = self.group(b, total, x_rows, block, column)
        following = b.add(index, const(I64, 1))
        index.add_incoming(const(I64, 0), entry)
        index.add_incoming(following, loop)
        for cell in self.cells:
            total[cell].add_incoming(const(self.e.f32, 0.0), entry)
            total[cell].add_incoming(new[cell], loop)
        b.cbranch(b.icmp_signed("<", following, groups), loop, done)
        b.position_at_end(done)
        self.finish(b, new, column, out, ldo, bias)
        return _none(b)

    def finish(self, b, sums: dict, column, out, ldo, bias) -> None:
        size, lanes = self.simd.itemsize, self.e.lanes
        at = b.mul(column, const(I64, size))
        for j in range(_VECTORS):
            offset = b.add(at, const(I64, j * lanes * size))
            shift = self.simd.emit_load(b, b.add(bias, offset))
            for i in range(self.rows):
                row = b.add(out, b.mul(ldo, const(I64, i)))
                self.simd.emit_store(b, b.add(row, offset), b.fadd(sums[i, j], shift))


def make_quant_tile(simd: Simd, fmt: QuantFormat, rows: int) -> Callable:
    """Intrinsic tile(x, x_row, panel, column, out, ldo, bias, groups): out[i, column + n] =
    dot(x[i], panel[column + n]) + bias[column + n] for `rows` quantised rows of x and two vectors
    of outputs; strides in bytes.
    """
    return make_intrinsic(types.void(*[types.int64] * 8), _Tile(simd, fmt, rows).emit)


def make_quant_gemm(simd: Simd, fmt: QuantFormat) -> Callable:
    """out = x W^T + bias; an item is a panel and up to MAX_ROWS rows."""
    iload64, div, itemsize, take_share = simd.iload64, simd.div, simd.itemsize, make_take_share(simd)
    wide = simd.lanes == 16
    outputs = _VECTORS * simd.lanes
    most = 6 if wide else 2  # as many sums as there are registers for
    tile6, tile5, tile4, tile3, tile2, tile1 = (
        make_quant_tile(simd, fmt, min(rows, most)) for rows in (6, 5, 4, 3, 2, 1)
    )
    quantize_row = make_quantize_row(simd)
    stack = make_intrinsic(types.int64(), _emit_stack)

    @jit
    def part(rows, x, x_row, panel, column, out, ldo, bias, groups):
        if rows == 1:
            tile1(x, x_row, panel, column, out, ldo, bias, groups)
        elif rows == 2:
            tile2(x, x_row, panel, column, out, ldo, bias, groups)
        elif wide:
            if rows == 3:
                tile3(x, x_row, panel, column, out, ldo, bias, groups)
            elif rows == 4:
                tile4(x, x_row, panel, column, out, ldo, bias, groups)
            elif rows == 5:
                tile5(x, x_row, panel, column, out, ldo, bias, groups)
            else:
                tile6(x, x_row, panel, column, out, ldo, bias, groups)

    @jit
    def panel_product(p, x, first_row, rows, panel):
        """Rows in parts as equal as may be."""
        ldo, groups = iload64(p + Q.QUANT_OUT_ROW), iload64(p + Q.QUANT_GROUPS)
        x_row = groups * Q.X_GROUP_BYTES
        weights = iload64(p + Q.QUANT_W) + panel * iload64(p + Q.QUANT_PANEL_BYTES)
        x += first_row * x_row
        out = iload64(p + Q.QUANT_OUT) + first_row * ldo + panel * (itemsize * PANEL)
        bias = iload64(p + Q.QUANT_BIAS) + panel * iload64(p + Q.QUANT_BIAS_PANEL)
        left = div(rows + most - 1, most)
        while left > 0:
            count = div(rows + left - 1, left)
            for column in range(0, PANEL, outputs):
                part(count, x, x_row, weights, column, out, ldo, bias, groups)
            x, out, rows, left = x + count * x_row, out + count * ldo, rows - count, left - 1

    @jit
    def quantize_all(p, to):
        groups = iload64(p + Q.QUANT_GROUPS)
        for row in range(iload64(p + Q.QUANT_M)):
            source = iload64(p + Q.QUANT_X) + row * iload64(p + Q.QUANT_X_ROW)
            quantize_row(source, to + row * groups * Q.X_GROUP_BYTES, groups)

    def kernel(p):
        own = stack()
        items, shares = iload64(p + 16), iload64(p + 8)
        panels, m = iload64(p + Q.QUANT_PANELS), iload64(p + Q.QUANT_M)
        x = iload64(p + Q.QUANT_READY)
        first, stop = take_share(p, items, shares)
        if first < stop and x == 0:
            x = own
            quantize_all(p, x)
        while first < stop:
            for item in range(first, stop):
                block = div(item, panels)
                row = block * MAX_ROWS
                panel_product(p, x, row, min(MAX_ROWS, m - row), item - block * panels)
            first, stop = take_share(p, items, shares)

    return kernel


def _emit_stack(b: ir.IRBuilder) -> ir.Value:
    slot = cgutils.alloca_once(b, ir.ArrayType(I64, Q.STACK_BYTES // 8))
    slot.align = 64
    return b.ptrtoint(slot, I64)


def make_quantize_row(simd: Simd) -> Callable:
    """f(x, out, groups): a row of x in the storage dtype to quantised groups."""
    quantize_group = make_quantize_group(simd)
    group_bytes = GROUP * simd.itemsize

    @jit
    def quantize_row(x, out, groups):
        for group in range(groups):
            quantize_group(x + group * group_bytes, out + group * Q.X_GROUP_BYTES)

    return quantize_row


def make_quantize_rows(simd: Simd) -> Callable:
    """Rows of x to quantised rows, for products with many of them."""
    iload64, quantize_row = simd.iload64, make_quantize_row(simd)

    @jit
    def body(p, first, stop):
        groups = iload64(p + Q.ROWS_GROUPS)
        for row in range(first, stop):
            quantize_row(
                iload64(p + Q.ROWS_X) + row * iload64(p + Q.ROWS_X_ROW),
                iload64(p + Q.ROWS_OUT) + row * groups * Q.X_GROUP_BYTES,
                groups,
            )

    return each_range(simd, body)


def make_quant_embedding(simd: Simd, fmt: QuantFormat) -> Callable:
    """out[i] = row ids[i] of a packed table in the storage dtype; ids int32."""
    iload64, iload32, store1, div, itemsize = (
        simd.iload64,
        simd.iload32,
        simd.store1,
        simd.div,
        simd.itemsize,
    )
    half1 = make_intrinsic(
        types.float32(types.int64),
        lambda b, a: b.fpext(load(b, a, ir.HalfType(), 2), ir.FloatType()),
    )
    byte1 = make_intrinsic(
        types.int64(types.int64), lambda b, a: b.zext(load(b, a, ir.IntType(8), 1), I64)
    )
    header, block_bytes, has_min = fmt.header_bytes * PANEL, fmt.block_bytes * PANEL, fmt.has_min
    bits, zero, num_codes = fmt.bits, fmt.zero_code, 4 * fmt.num_words
    no_minimum = np.float32(0)

    @jit
    def group(block, lane, out):
        scale = half1(block + 2 * lane)
        minimum = half1(block + 2 * PANEL + 2 * lane) if has_min else no_minimum
        for j in range(num_codes):
            code = byte1(block + header + (j // 4) * (4 * PANEL) + 4 * lane + j % 4)
            if bits == 8:
                store1(out + itemsize * j, scale * np.float32(code - zero) + minimum)
            else:
                low, high = np.float32((code & 15) - zero), np.float32((code >> 4) - zero)
                store1(out + itemsize * j, scale * low + minimum)
                store1(out + itemsize * (j + 16), scale * high + minimum)

    @jit
    def body(p, first, stop):
        groups = iload64(p + Q.LOOKUP_GROUPS)
        for i in range(first, stop):
            token = iload32(iload64(p + Q.LOOKUP_IDS) + 4 * i)
            panel = div(token, PANEL)
            table = iload64(p + Q.LOOKUP_TABLE) + panel * iload64(p + Q.LOOKUP_PANEL_BYTES)
            out = iload64(p + Q.LOOKUP_OUT) + i * groups * (GROUP * itemsize)
            for at in range(groups):
                group(table + at * block_bytes, token - panel * PANEL, out + at * (GROUP * itemsize))

    return each_range(simd, body)


def build_format(simd: Simd, fmt: QuantFormat) -> dict[str, Callable]:
    """The kernels of one format, by name."""
    return {
        "gemm": make_quant_gemm(simd, fmt),
        "embedding": make_quant_embedding(simd, fmt),
        "quantize_rows": make_quantize_rows(simd),
    }

# SPDX-License-Identifier: Apache-2.0
"""Vectors of small integers: rows quantised to int8, and products of bytes. Numba code."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from . import quant_args as Q
from .quant_format import GROUP
from .simd import F32, I32, I64, Simd, _none, call, const, make_intrinsic, store
from .target import Target

I8 = ir.IntType(8)
_ROUND_MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low bits


def has_vnni(target: Target) -> bool:
    """Whether one instruction multiplies four pairs of bytes and adds them to a sum."""
    features = target.features.split(",")
    if target.lanes == 16:
        return "+avx512vnni" in features
    return "+avxvnni" in features or {"+avx512vnni", "+avx512vl"} <= set(features)


def make_sum_of_products(simd: Simd) -> Callable:
    """`f(builder, acc, codes, x)` on int32 vectors: acc + the products of the four unsigned bytes of
    `codes` with the four signed ones of `x`, lane by lane; exact."""
    e = simd.emit
    if has_vnni(simd.target):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}"
        # Words, as LLVM had it up to 21; later ones take that too, and make bytes of them.
        return lambda b, acc, codes, x: call(b, name, e.i32, acc, codes, x)

    def emit(b, acc, codes, x):
        for byte in range(4):
            left = const(e.i32, 24 - 8 * byte)
            code = b.and_(b.lshr(codes, const(e.i32, 8 * byte)), const(e.i32, 0xFF))
            acc = b.add(acc, b.mul(code, b.ashr(b.shl(x, left), const(e.i32, 24))))
        return acc

    return emit


def make_quantize_group(simd: Simd) -> Callable:
    """Intrinsic (x, out): GROUP values to GROUP int8 and the words about them (quant_args.py).

    The scale is the largest magnitude over 127; a value that is not finite makes the scale NaN, and
    with it every product of the row.
    """
    e, parts = simd.emit, GROUP // simd.lanes
    bytes_ = ir.VectorType(I8, e.lanes)
    absolute = f"llvm.fabs.v{e.lanes}f32"

    def scales(b, values):
        """(1 / scale, scale)."""
        largest, poison = const(e.f32, 0.0), const(e.f32, 0.0)
        for value in values:
            largest = e.maximum(b, call(b, absolute, e.f32, value), largest)
            poison = b.fadd(poison, b.fmul(value, const(e.f32, 0.0)))
        amax = e.reduce(b, largest, e.maximum)
        bad = e.reduce(b, poison, lambda b, x, y: b.fadd(x, y))
        positive = b.fcmp_ordered(">", amax, const(F32, 0.0))
        inverse = b.select(positive, b.fdiv(const(F32, 127.0), amax), const(F32, 0.0))
        return inverse, b.fadd(b.fdiv(amax, const(F32, 127.0)), bad)

    def emit(b: ir.IRBuilder, x, out):
        step = e.lanes * simd.itemsize
        values = [simd.emit_load(b, b.add(x, const(I64, i * step))) for i in range(parts)]
        inverse, scale = scales(b, values)
        magic, total = const(e.f32, _ROUND_MAGIC), const(e.i32, 0)
        for i, value in enumerate(values):
            shifted = e.fma(b, value, e.splat(b, inverse), magic)
            code = b.sub(b.bitcast(shifted, e.i32), b.bitcast(magic, e.i32))
            total = b.add(total, code)
            store(b, b.trunc(code, bytes_), b.add(out, const(I64, i * e.lanes)), 1)
        count = e.reduce(b, total, lambda b, p, q: b.add(p, q))
        words = {
            Q.X_SCALE: scale,
            Q.X_MINUS_128: b.mul(count, const(I32, -128)),
            Q.X_MINUS_8: b.mul(count, const(I32, -8)),
            Q.X_SUM: b.fmul(scale, b.sitofp(count, F32)),
        }
        for offset, value in words.items():
            store(b, value, b.add(out, const(I64, offset)), 4)
        return _none(b)

    return make_intrinsic(types.void(types.int64, types.int64), emit)

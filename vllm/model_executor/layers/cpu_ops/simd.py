# SPDX-License-Identifier: Apache-2.0
"""Vectors for compiled Python: a numba type of `lanes` float32 values and the operations on it.

Kernels address memory by plain int64 addresses, so one compiled kernel serves every stride. There
are no fast-math flags anywhere: the order of each sum is the one that is written, NaN and Inf
behave, and results do not depend on what the optimiser fancies. Imported only when kernels are
compiled (it needs numba).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.extending import intrinsic, overload, register_model
from numba.core.typing import signature

from .target import Target

I1, I16, I32, I64, F32 = (
    ir.IntType(1),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
# 2**f = 1 + f * poly(f) on [-0.5, 0.5]: least squares on Chebyshev nodes, relative error below
# 2e-8.
EXP2_POLY = (
    0.6931471824645996,
    0.24022647738456726,
    0.05550329014658928,
    0.009618373587727547,
    0.0013399808667600155,
    0.00015370632172562182,
)
# The same with a relative error below 4e-6: enough where the result is rounded to bfloat16.
EXP2_POLY_SHORT = (
    0.6931220293045044,
    0.24023719131946564,
    0.05591663345694542,
    0.009600325487554073,
)
_ROUND_MAGIC = (
    12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low mantissa bits
)


class BFloatType(ir.Type):
    """LLVM's bfloat, which llvmlite's IR layer does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


class VectorType(types.Type):
    """numba's view of a vector of `lanes` float32 values."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"f32x{lanes}")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(F32, fe_type.lanes))


def make_intrinsic(sig, emit: Callable) -> Callable:
    """A function numba can call: `emit(builder, *llvm_args)` writes its body."""

    def definition(typing_context, *args):
        def codegen(context, builder, _signature, llvm_args):
            return emit(builder, *llvm_args)

        return sig, codegen

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typing_context"] + [f"a{i}" for i in range(len(sig.args))]
    definition.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return intrinsic(definition)


def pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def load(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, align: int) -> ir.Value:
    value = builder.load(pointer(builder, address, pointee))
    value.align = align
    return value


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> None:
    builder.store(value, pointer(builder, address, value.type), align=align)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    fnty = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), args)


def const(ty: ir.Type, value) -> ir.Constant:
    return ir.Constant(ty, [value] * ty.count if isinstance(ty, ir.VectorType) else value)


class VectorBuilder:
    """Emits LLVM for vectors of one width. Each method takes and returns LLVM values."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.f32 = ir.VectorType(F32, lanes)
        self.i32 = ir.VectorType(I32, lanes)
        self.i16 = ir.VectorType(I16, lanes)
        self.f16 = ir.VectorType(ir.HalfType(), lanes)

    def splat(self, b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
        ty = ir.VectorType(scalar.type, self.lanes)
        first = b.insert_element(ir.Constant(ty, ir.Undefined), scalar, const(I32, 0))
        return b.shuffle_vector(first, ir.Constant(ty, ir.Undefined), const(self.i32, 0))

    def iota(self) -> ir.Constant:
        return ir.Constant(self.i32, list(range(self.lanes)))

    def fma(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return call(b, f"llvm.fma.v{self.lanes}f32", self.f32, x, y, z)

    def maximum(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def reduce(self, b: ir.IRBuilder, x: ir.Value, op: Callable) -> ir.Value:
        """Folds halves onto each other: a fixed order, so the same bits everywhere."""
        step = self.lanes // 2
        while step:
            mask = [(i + step) % self.lanes for i in range(self.lanes)]
            x = op(b, x, b.shuffle_vector(x, x, ir.Constant(self.i32, mask)))
            step //= 2
        return b.extract_element(x, const(I32, 0))

    def tail_mask(self, b: ir.IRBuilder, count: ir.Value) -> ir.Value:
        return b.icmp_signed("<", self.iota(), self.splat(b, b.trunc(count, I32)))

    def load_tail(
        self, b: ir.IRBuilder, address: ir.Value, ty: ir.VectorType, suffix: str, count: ir.Value
    ) -> ir.Value:
        """`count` elements, zero beyond; memory beyond is not touched."""
        name = f"llvm.masked.load.v{self.lanes}{suffix}.p0"
        return call(
            b,
            name,
            ty,
            pointer(b, address, ty),
            const(I32, 1),
            self.tail_mask(b, count),
            const(ty, 0),
        )

    def store_tail(
        self, b: ir.IRBuilder, value: ir.Value, address: ir.Value, suffix: str, count: ir.Value
    ) -> None:
        name = f"llvm.masked.store.v{self.lanes}{suffix}.p0"
        call(
            b,
            name,
            ir.VoidType(),
            value,
            pointer(b, address, value.type),
            const(I32, 1),
            self.tail_mask(b, count),
        )

    def widen_bf16(self, b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        return b.bitcast(b.shl(b.zext(bits, self.i32), const(self.i32, 16)), self.f32)

    def narrow_bf16(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """Round to nearest even; NaN stays NaN."""
        bits = b.bitcast(x, self.i32)
        odd = b.and_(b.lshr(bits, const(self.i32, 16)), const(self.i32, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, const(self.i32, 0x7FFF))), const(self.i32, 16))
        is_nan = b.fcmp_unordered("uno", x, x)
        return b.trunc(b.select(is_nan, const(self.i32, 0x7FC0), rounded), self.i16)

    def exp2(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """2**x. Exactly 1 at 0, exactly 0 below -126.5 (and for -inf), capped at 2**127; NaN
        stays NaN.
        """
        high = const(self.f32, 127.0)
        return self.exp2_below(b, b.select(b.fcmp_ordered(">", x, high), high, x), EXP2_POLY)

    def exp2_below(self, b: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
        """The same for x of at most 127, to the precision of the polynomial."""
        low, magic = const(self.f32, -127.0), const(self.f32, _ROUND_MAGIC)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
        shifted = b.fadd(x, magic)
        f = b.fsub(x, b.fsub(shifted, magic))
        poly = const(self.f32, coefficients[-1])
        for c in coefficients[-2::-1]:
            poly = self.fma(b, poly, f, const(self.f32, c))
        poly = self.fma(b, poly, f, const(self.f32, 1.0))
        exponent = b.add(
            b.shl(b.bitcast(shifted, self.i32), const(self.i32, 23)), const(self.i32, 127 << 23)
        )
        return b.fmul(poly, b.bitcast(exponent, self.f32))

    def transpose(self, b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
        """A square of `lanes` x `lanes`, by swapping ever larger sub-squares."""
        rows, n, step = list(rows), self.lanes, 1
        while step < n:
            take_low = [i if not i & step else n + i - step for i in range(n)]
            take_high = [i + step if not i & step else n + i for i in range(n)]
            for i in (i for i in range(n) if not i & step):
                low, high = rows[i], rows[i + step]
                rows[i] = b.shuffle_vector(low, high, ir.Constant(self.i32, take_low))
                rows[i + step] = b.shuffle_vector(low, high, ir.Constant(self.i32, take_high))
            step *= 2
        return rows


class Simd:
    """The operations kernels use, for one target and one storage dtype.

    `load`, `store` and their `_tail` forms convert between the storage dtype and float32 vectors;
    `fload`, `fstore` are float32 scratch; scalars are `load1`, `store1`, `fload1`, `fstore1`,
    `iload32`, `iload64`. `pairs` says that matrix tiles take bfloat16 pairs (see gemm.py).
    """

    def __init__(self, target: Target, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        self.lanes = target.lanes
        self.itemsize = 4 if dtype == "float32" else 2
        self.pairs = dtype == "bfloat16" and target.bf16_dot
        self.vector = VectorType(target.lanes)
        self.emit = VectorBuilder(target.lanes)
        self._scalars()
        self._vectors()
        self._memory()
        _register_operators(self.vector)

    def _scalars(self) -> None:
        i64, i32, f32, void = types.int64, types.int32, types.float32, types.void
        self.iload64 = make_intrinsic(i64(i64), lambda b, a: load(b, a, I64, 8))
        self.istore64 = make_intrinsic(void(i64, i64), lambda b, a, v: _none(b, store(b, v, a, 8)))
        self.dload64 = make_intrinsic(
            types.float64(i64), lambda b, a: load(b, a, ir.DoubleType(), 8)
        )
        self.iload32 = make_intrinsic(i64(i64), lambda b, a: b.sext(load(b, a, I32, 4), I64))
        self.istore32 = make_intrinsic(void(i64, i32), lambda b, a, v: _none(b, store(b, v, a, 4)))
        self.fload1 = make_intrinsic(f32(i64), lambda b, a: load(b, a, F32, 4))
        self.fstore1 = make_intrinsic(void(i64, f32), lambda b, a, v: _none(b, store(b, v, a, 4)))
        self.atomic_add = make_intrinsic(
            i64(i64, i64), lambda b, a, v: b.atomic_rmw("add", pointer(b, a, I64), v, "seq_cst")
        )
        self.atomic_load = make_intrinsic(
            i64(i64), lambda b, a: b.load_atomic(pointer(b, a, I64), "acquire", 8)
        )
        # Whether the word held `old` and now holds `new`.
        self.compare_exchange = make_intrinsic(
            types.boolean(i64, i64, i64), self._emit_compare_exchange
        )
        self.copy = make_intrinsic(void(i64, i64, i64), self._emit_copy)
        # Address of 64 bytes of the caller's stack frame; call outside loops.
        self.stack = make_intrinsic(
            i64(), lambda b: b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(I64, 8)), I64)
        )
        self.prefetch = make_intrinsic(void(i64), self.emit_prefetch)
        self.pause = make_intrinsic(void(), self._emit_pause)
        # Elsewhere user programs may be forbidden to read such a counter.
        self.cycles = make_intrinsic(
            i64(),
            lambda b: call(b, "llvm.readcyclecounter", I64)
            if self.target.family == "x86"
            else const(I64, 0),
        )
        # Functions at an address: without arguments, with one, and `syscall` for a futex.
        self.call0 = make_intrinsic(void(i64), _emit_call_address)
        self.call1 = make_intrinsic(void(i64, i64), _emit_call_address)
        self.call_futex = make_intrinsic(void(i64, i64, i64, i64), self._emit_futex)
        # C's division: callers never pass negatives, and Python's rounding costs a branch.
        self.div = make_intrinsic(i64(i64, i64), lambda b, x, y: b.udiv(x, y))

    @staticmethod
    def _emit_compare_exchange(
        b: ir.IRBuilder, address: ir.Value, old: ir.Value, new: ir.Value
    ) -> ir.Value:
        both = b.cmpxchg(pointer(b, address, I64), old, new, "seq_cst", "seq_cst")
        return b.extract_value(both, 1)

    def _emit_pause(self, b: ir.IRBuilder) -> ir.Value:
        """Tells the core that this is a loop that waits."""
        if self.target.family == "x86":
            call(b, "llvm.x86.sse2.pause", ir.VoidType())
        elif self.target.family == "arm":
            call(b, "llvm.aarch64.hint", ir.VoidType(), const(I32, 1))  # yield
        return _none(b)

    @staticmethod
    def _emit_futex(b, syscall, address, operation, value) -> ir.Value:
        """syscall(SYS_futex, address, operation, value, no timeout, none, 0). `operation` holds the
        number of the call in its high half."""
        number, zero = b.lshr(operation, const(I64, 32)), const(I64, 0)
        low = b.and_(operation, const(I64, 0xFFFFFFFF))
        return _emit_call_address(b, syscall, number, address, low, value, zero, zero, zero)

    @staticmethod
    def emit_prefetch(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        args = (pointer(b, address, ir.IntType(8)), const(I32, 0), const(I32, 2), const(I32, 1))
        return _none(b, call(b, "llvm.prefetch.p0", ir.VoidType(), *args))

    @staticmethod
    def _emit_copy(b: ir.IRBuilder, to: ir.Value, source: ir.Value, nbytes: ir.Value) -> ir.Value:
        byte = ir.IntType(8)
        args = (pointer(b, to, byte), pointer(b, source, byte), nbytes, const(I1, 0))
        return _none(b, call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *args))

    def _vectors(self) -> None:
        v, f32, i64, e = self.vector, types.float32, types.int64, self.emit
        self.splat = make_intrinsic(v(f32), e.splat)
        self.fma = make_intrinsic(v(v, v, v), e.fma)
        self.maximum = make_intrinsic(v(v, v), e.maximum)
        self.exp2 = make_intrinsic(v(v), e.exp2)
        short = EXP2_POLY_SHORT if self.pairs else EXP2_POLY
        self.exp2_weight = make_intrinsic(v(v), lambda b, x: e.exp2_below(b, x, short))
        self.hsum = make_intrinsic(
            f32(v), lambda b, x: e.reduce(b, x, lambda b, p, q: b.fadd(p, q))
        )
        self.hmax = make_intrinsic(f32(v), lambda b, x: e.reduce(b, x, e.maximum))
        self.first = make_intrinsic(f32(v), lambda b, x: b.extract_element(x, const(I32, 0)))
        self.sqrt = make_intrinsic(v(v), lambda b, x: call(b, f"llvm.sqrt.v{e.lanes}f32", e.f32, x))
        self.absolute = make_intrinsic(
            v(v), lambda b, x: call(b, f"llvm.fabs.v{e.lanes}f32", e.f32, x)
        )
        self.choose_negative = make_intrinsic(
            v(v, v, v), lambda b, x, y, z: b.select(b.fcmp_ordered("<", x, const(e.f32, 0.0)), y, z)
        )
        self.iota_from = make_intrinsic(v(i64), self._emit_iota_from)
        self.keep_range = make_intrinsic(v(v, i64, i64, i64, f32), self._emit_keep_range)

    def _emit_iota_from(self, b: ir.IRBuilder, first: ir.Value) -> ir.Value:
        e = self.emit
        return b.sitofp(b.add(e.iota(), e.splat(b, b.trunc(first, I32))), e.f32)

    def _emit_keep_range(self, b, x, first, low, high, fill):
        """Lane i stands for position first + i: kept where low <= position < high, else `fill`."""
        e = self.emit
        position = b.add(e.iota(), e.splat(b, b.trunc(first, I32)))
        above = b.icmp_signed(">=", position, e.splat(b, b.trunc(low, I32)))
        below = b.icmp_signed("<", position, e.splat(b, b.trunc(high, I32)))
        return b.select(b.and_(above, below), x, e.splat(b, fill))

    def _memory(self) -> None:
        v, f32, i64, void, e = self.vector, types.float32, types.int64, types.void, self.emit
        self.fload = make_intrinsic(v(i64), lambda b, a: load(b, a, e.f32, 4))
        self.fstore = make_intrinsic(void(i64, v), lambda b, a, x: _none(b, store(b, x, a, 4)))
        self.fload_tail = make_intrinsic(
            v(i64, i64), lambda b, a, n: e.load_tail(b, a, e.f32, "f32", n)
        )
        self.fstore_tail = make_intrinsic(
            void(i64, v, i64), lambda b, a, x, n: _none(b, e.store_tail(b, x, a, "f32", n))
        )
        self.load = make_intrinsic(v(i64), self.emit_load)
        self.load_tail = make_intrinsic(v(i64, i64), self.emit_load)
        self.store = make_intrinsic(void(i64, v), self.emit_store)
        self.store_tail = make_intrinsic(void(i64, v, i64), self.emit_store)
        # What a value looks like after a round trip through the storage dtype.
        self.round = make_intrinsic(v(v), lambda b, x: self.emit_widen(b, self.emit_narrow(b, x)))
        # Finite, normal values only where the CPU rounds them itself: it flushes what is below
        # 1.2e-38.
        self.store_weight = make_intrinsic(void(i64, v), self._emit_store_weight)
        self.load1 = make_intrinsic(f32(i64), self._emit_load1)
        self.store1 = make_intrinsic(void(i64, f32), self._emit_store1)

    def storage(self) -> tuple[ir.VectorType, str]:
        e = self.emit
        return {"float32": (e.f32, "f32"), "bfloat16": (e.i16, "i16"), "float16": (e.f16, "f16")}[
            self.dtype
        ]

    def emit_widen(self, b: ir.IRBuilder, raw: ir.Value) -> ir.Value:
        if self.dtype == "bfloat16":
            return self.emit.widen_bf16(b, raw)
        return b.fpext(raw, self.emit.f32) if self.dtype == "float16" else raw

    def emit_narrow(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        if self.dtype == "bfloat16":
            return self.emit.narrow_bf16(b, x)
        return b.fptrunc(x, self.emit.f16) if self.dtype == "float16" else x

    def emit_load(
        self, b: ir.IRBuilder, address: ir.Value, count: ir.Value | None = None
    ) -> ir.Value:
        ty, suffix = self.storage()
        if count is None:
            return self.emit_widen(b, load(b, address, ty, self.itemsize))
        return self.emit_widen(b, self.emit.load_tail(b, address, ty, suffix, count))

    def emit_store(
        self, b: ir.IRBuilder, address: ir.Value, x: ir.Value, count: ir.Value | None = None
    ) -> ir.Value:
        _, suffix = self.storage()
        raw = self.emit_narrow(b, x)
        if count is None:
            return _none(b, store(b, raw, address, self.itemsize))
        return _none(b, self.emit.store_tail(b, raw, address, suffix, count))

    def _emit_store_weight(self, b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> ir.Value:
        """Attention weights as the matrix tiles take them: bfloat16 in pair mode, else float32."""
        e = self.emit
        if not self.pairs:
            return _none(b, store(b, x, address, 4))
        name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * e.lanes}"
        return _none(
            b, store(b, call(b, name, ir.VectorType(BFloatType(), e.lanes), x), address, 2)
        )

    def _emit_load1(self, b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return b.extract_element(self.emit_load(b, address, const(I64, 1)), const(I32, 0))

    def _emit_store1(self, b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> ir.Value:
        return self.emit_store(b, address, self.emit.splat(b, x), const(I64, 1))


def _emit_call_address(b: ir.IRBuilder, address: ir.Value, *args: ir.Value) -> ir.Value:
    """Calls a C function of int64 arguments; what it returns is left."""
    fnty = ir.FunctionType(I64, [I64] * len(args))
    b.call(b.inttoptr(address, fnty.as_pointer()), args)
    return _none(b)


def _none(builder: ir.IRBuilder, _value: object = None) -> ir.Value:
    """What numba expects from a void intrinsic."""
    return ir.Constant(ir.IntType(8).as_pointer(), None)


_OPERATORS = {
    operator.add: "fadd",
    operator.sub: "fsub",
    operator.mul: "fmul",
    operator.truediv: "fdiv",
}
_registered: set[VectorType] = set()


def _register_operators(vector: VectorType) -> None:
    """`+ - * /` on vectors of this width, once."""
    if vector in _registered:
        return
    _registered.add(vector)
    for python_op, llvm_op in _OPERATORS.items():
        raw = make_intrinsic(
            signature(vector, vector, vector),
            lambda b, x, y, llvm_op=llvm_op: getattr(b, llvm_op)(x, y),
        )
        _overload_operator(python_op, vector, raw)


def _overload_operator(python_op: Callable, vector: VectorType, raw: Callable) -> None:
    @overload(python_op)
    def typed(x, y):
        if x == vector and y == vector:
            return lambda x, y: raw(x, y)
        return None

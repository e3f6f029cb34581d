# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits: what packing keeps, what products with them are, how far they are off."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from llvmlite import ir

from vllm.model_executor.layers.cpu_ops.quant_format import FORMATS, INT4, INT4_MIN, INT8
from vllm.model_executor.layers.cpu_ops.quant_linear import (
    quantized_embedding,
    quantized_linear,
    quantized_size,
)
from vllm.model_executor.layers.cpu_ops.quant_packing import (
    dequantize,
    fills_panels,
    pack_blocks,
    quantize,
    unpack_blocks,
)
from vllm.model_executor.layers.cpu_ops.quant_simd import make_sum_of_products
from vllm.model_executor.layers.cpu_ops.simd import Simd
from vllm.model_executor.layers.cpu_ops.target import Target

BF16, F32 = torch.bfloat16, torch.float32
# Each format with one dtype at least; each pair is compiled once.
KERNELS = [(INT8, F32), (INT8, BF16), (INT4, F32), (INT4_MIN, BF16)]
each_kernel = pytest.mark.parametrize(("fmt", "dtype"), KERNELS, ids=str)


def random_blocks(fmt, n: int, k: int) -> torch.Tensor:
    """Every code, scales of both signs."""
    generator = torch.Generator().manual_seed(n + k)
    blocks = torch.randint(
        0, 256, (n, k // 32, fmt.block_bytes), dtype=torch.uint8, generator=generator
    )
    header = torch.randn(n, k // 32, fmt.header_bytes // 2, generator=generator) / 10
    blocks[..., : fmt.header_bytes] = header.half().view(torch.uint8)
    return blocks


def exact_inputs(rows: int, k: int) -> torch.Tensor:
    """Whole numbers with 127 in each group: 8 bits hold them exactly."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, k), generator=generator).float()
    x[:, 5::32] = 127
    return x


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_packing_loses_nothing(fmt):
    blocks = random_blocks(fmt, 96, 160)
    packed = pack_blocks(blocks, fmt)
    assert packed.nbytes == blocks.nbytes and quantized_size(packed, fmt) == (96, 160)
    assert torch.equal(unpack_blocks(packed, fmt), blocks)


def test_which_sizes_are_packed():
    assert fills_panels(32, 32) and fills_panels(96, 160)
    for size in [(33, 32), (32, 48), (0, 32), (32, 0)]:
        assert not fills_panels(*size)


@pytest.mark.parametrize(("fmt", "bound"), [(INT8, 0.0056), (INT4_MIN, 0.077)], ids=str)
def test_rounding_of_weights(fmt, bound):
    """Each value goes to the nearest code that there is, zeros stay zeros, and the whole error is no
    more than measured: guards against a scale that wastes codes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 320)
    weight[3] = 0
    weight[4] *= 1e-9  # less than float16's scales reach
    weight[5] *= 1e3
    blocks = quantize(weight, fmt)
    values = dequantize(blocks, fmt)
    scale = blocks[..., :2].contiguous().view(torch.float16).float().abs()
    error = (values - weight).abs().view(64, 10, 32)
    edge = 0 if fmt is INT8 else 1  # 4 bits may cut the least and the largest values off
    assert (error <= scale * (0.51 + edge)).all()
    assert not values[3].any() and values[4].abs().max() < 1e-6
    plain = [i for i in range(64) if i not in (3, 4, 5)]
    assert (values - weight)[plain].norm() <= bound * weight[plain].norm()


def test_what_fits_is_kept():
    """Values that have codes are those codes: weights that were quantised once lose nothing more."""
    blocks = random_blocks(INT4_MIN, 64, 320)
    blocks[..., 1] &= 0x7F  # scales are positive
    blocks[..., 4:6] = 0xF0  # each group has its least and its largest code
    values = dequantize(blocks, INT4_MIN)
    assert torch.equal(dequantize(quantize(values, INT4_MIN), INT4_MIN), values)


def test_four_bits_without_a_minimum_come_from_files():
    with pytest.raises(ValueError, match="nothing is quantised to int4$"):
        quantize(torch.zeros(32, 32), INT4)


@each_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9, 13, 193])
def test_product_has_the_values_of_the_weights(fmt, dtype, rows):
    """With inputs that 8 bits hold, it is the float64 product with the dequantised weights but for
    the rounding of sums: no code, scale, minimum or bias is in another's place."""
    n, k = 96, 160
    blocks, x = random_blocks(fmt, n, k), exact_inputs(rows, k)
    bias = torch.randn(n).to(dtype)
    expected = F.linear(x.double(), dequantize(blocks, fmt).double(), bias.double())
    packed, inputs = pack_blocks(blocks, fmt), F.pad(x, (3, 3)).to(dtype)[:, 3:-3]
    for shift, wanted in [(bias, expected), (None, expected - bias.double())]:
        out = quantized_linear(inputs, packed, fmt, shift)
        assert out.dtype is dtype
        bound = 2e-6 if dtype is F32 else 2**-8
        assert (out.double() - wanted).abs().max() <= bound * wanted.abs().max()
    assert torch.equal(quantized_linear(inputs[None], packed, fmt)[0], out)


@each_kernel
def test_error_of_rounded_inputs(fmt, dtype):
    """Inputs of any values are rounded to 8 bits by groups of 32: half a per cent."""
    torch.manual_seed(0)
    blocks, x = random_blocks(fmt, 64, 576), torch.randn(50, 576).to(dtype)
    expected = F.linear(x.double(), dequantize(blocks, fmt).double())
    out = quantized_linear(x, pack_blocks(blocks, fmt), fmt).double()
    assert (out - expected).norm() <= 0.0065 * expected.norm()


@each_kernel
def test_bits_do_not_depend_on_the_batch(fmt, dtype):
    """Few rows are quantised by each thread, many by a kernel of its own, tiles differ: a request's
    numbers are the same."""
    torch.manual_seed(0)
    x, packed = torch.randn(405, 576).to(dtype), pack_blocks(random_blocks(fmt, 64, 576), fmt)
    whole = quantized_linear(x, packed, fmt)
    for first, count in [(0, 1), (404, 1), (7, 2), (50, 8), (50, 9), (100, 193), (3, 64)]:
        part = quantized_linear(x[first : first + count], packed, fmt)
        assert torch.equal(part, whole[first : first + count])


@each_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_value_of_another_row_or_column(fmt, dtype, bad):
    """What is not finite in a row of x stays in that row; in a weight's scale, in that output."""
    x, blocks = torch.randn(30, 64), random_blocks(fmt, 96, 64)
    x[4, 7] = bad
    blocks[40, 1, :2] = torch.tensor([bad]).half().view(torch.uint8)
    out = quantized_linear(x.to(dtype), pack_blocks(blocks, fmt), fmt).isfinite()
    expected = torch.ones_like(out)
    expected[4], expected[:, 40] = False, False
    assert torch.equal(out, expected)


def test_zeros_and_no_rows():
    packed = pack_blocks(random_blocks(INT8, 32, 64), INT8)
    assert not quantized_linear(torch.zeros(3, 64), packed, INT8).any()
    assert quantized_linear(torch.zeros(0, 64), packed, INT8).shape == (0, 32)
    with pytest.raises(ValueError, match=r"does not fit a packed int8 weight \(32, 64\)"):
        quantized_linear(torch.zeros(3, 32), packed, INT8)
    with pytest.raises(ValueError, match="bias"):
        quantized_linear(torch.zeros(3, 64), packed, INT8, torch.zeros(32, dtype=BF16))


def test_inputs_too_wide_for_a_threads_stack():
    """Eight rows of 8192 inputs: they are quantised in memory instead."""
    blocks, x = random_blocks(INT8, 32, 8192), exact_inputs(8, 8192)
    expected = F.linear(x.double(), dequantize(blocks, INT8).double())
    out = quantized_linear(x, pack_blocks(blocks, INT8), INT8)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@each_kernel
def test_embedding(fmt, dtype):
    """Rows of the table, exactly, rounded once."""
    blocks = random_blocks(fmt, 64, 96)
    packed, table = pack_blocks(blocks, fmt), dequantize(blocks, fmt).to(dtype)
    ids = torch.tensor([[0, 31, 32], [63, 5, 5]])
    assert torch.equal(quantized_embedding(ids, packed, fmt, dtype), table[ids])
    assert quantized_embedding(ids[:, :0], packed, fmt, dtype).shape == (2, 0, 96)
    for outside in (-1, 64):
        with pytest.raises(IndexError, match="64 rows"):
            quantized_embedding(torch.tensor([3, outside]), packed, fmt, dtype)


def test_the_product_of_bytes_as_every_llvm_has_it():
    """Fault: its operands are vectors of bytes, which LLVM knows from 22 on only (llvmlite 0.48)."""
    module = ir.Module()
    simd = Simd(Target(16, True, "", "+avx512vnni", "x86"), "bfloat16")
    words = simd.emit.i32
    function = ir.Function(module, ir.FunctionType(words, [words] * 3), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(make_sum_of_products(simd)(builder, *function.args))
    (used,) = [f for f in module.functions if f.name == "llvm.x86.avx512.vpdpbusd.512"]
    assert [arg.type for arg in used.args] == [words] * 3


NARROW = """
import sys, pytest
from vllm.model_executor.layers.cpu_ops import kernel_library
from vllm.model_executor.layers.cpu_ops.target import Target
kernel_library.host_target = lambda: Target(8, False, "x86-64-v3", "+avx2,+fma,+f16c")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1], "-k", "not processors"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for AVX2")
def test_processors_without_vnni():
    """The same kernels compiled for AVX2: 8 lanes, products of bytes by shifts and multiplies."""
    run = subprocess.run([sys.executable, "-c", NARROW, __file__], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]

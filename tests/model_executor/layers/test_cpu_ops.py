# SPDX-License-Identifier: Apache-2.0
"""The CPU's small kernels against float64 references, and bit for bit where a rounding order is
promised.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numba import njit

from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.cpu_ops import elementwise, kernel_library
from vllm.model_executor.layers.cpu_ops.kernel_library import KernelLibrary, compile_beside
from vllm.model_executor.layers.cpu_ops.simd import Simd
from vllm.model_executor.layers.cpu_ops.target import Target
from vllm.v1.attention.ops.cpu import key_value_views, reshape_and_cache

# Half a unit in the last place of an output of size 1, and a little for the sum.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SIZES = pytest.mark.parametrize("size", [1, 7, 16, 24, 33, 576, 1000])


def near(actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> None:
    """Relative to the expected value, absolute below 1."""
    error = (actual.double() - expected).abs() / expected.abs().clamp(min=1)
    assert error.max().item() <= slack * TOLERANCE[actual.dtype], error.max().item()


def guarded(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows inside a wider buffer of NaN: a kernel that reads or writes past a row is found out."""
    wide = torch.full((rows, size + 40), float("nan"), dtype=dtype)
    wide[:, 8 : 8 + size] = torch.randn(rows, size).to(dtype)
    return wide[:, 8 : 8 + size]


def untouched(x: torch.Tensor) -> bool:
    """Nothing but the rows themselves was written."""
    wide = x._base
    return bool(torch.isnan(wide[:, :8]).all() and torch.isnan(wide[:, 8 + x.shape[1] :]).all())


@DTYPES
@SIZES
def test_rms_norm(dtype, size):
    """Rounds before the weight, as Llama's norm does; tails neither read nor write past a row."""
    x, weight = guarded(5, size, dtype), torch.randn(size).to(dtype)
    out = guarded(5, size, dtype)
    wide = x.double()
    normed = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype).double()
    assert cpu_ops.rms_norm(x, weight, 1e-5, out=out) is out
    near(out, normed * weight.double(), slack=2)
    assert untouched(out)


@DTYPES
@SIZES
def test_fused_add_rms_norm(dtype, size):
    """The residual is what torch's addition gives, bit for bit; the norm is that of the rounded
    sum.
    """
    x, residual, weight = (
        guarded(5, size, dtype),
        guarded(5, size, dtype),
        torch.randn(size).to(dtype),
    )
    total = x + residual
    expected = cpu_ops.rms_norm(total, weight, 1e-5)
    out = cpu_ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total) and untouched(residual)
    assert torch.equal(out, expected)


@DTYPES
@SIZES
def test_gemma_rms_norm(dtype, size):
    """Rounds once, after 1 + weight; the residual is torch's sum. Fault: Llama's order of rounding,
    or a tail that takes the 1 for a value."""
    x, residual = guarded(5, size, dtype), guarded(5, size, dtype)
    weight = torch.randn(size).to(dtype)
    total = x + residual
    wide = total.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    out = cpu_ops.gemma_rms_norm(x, weight, 1e-5, residual)
    near(out, normed * (1 + weight.double()), slack=2)
    assert torch.equal(residual, total) and untouched(residual)
    assert torch.equal(cpu_ops.gemma_rms_norm(total, weight, 1e-5), out)


@DTYPES
@SIZES
def test_copies_and_multiples_are_torchs(dtype, size):
    """Bit for bit: programs have these in the place of torch's. Fault: rows that lie apart are read
    as if they were packed, or a multiple is rounded twice."""
    x = guarded(5, size, dtype)
    dense = torch.empty(5, size, dtype=dtype)
    assert torch.equal(elementwise.copy_rows(x, dense), x)
    out = elementwise.scale(dense, 0.1 * size**0.5, torch.empty_like(dense))
    assert torch.equal(out, dense * (0.1 * size**0.5))
    with pytest.raises(ValueError, match="no kernel"):
        elementwise.copy_rows(x.expand(2, 5, size), dense)
    with pytest.raises(ValueError, match="no kernel"):
        elementwise.scale(x, 2.0, torch.empty(5, size + 1, dtype=dtype))


def test_rms_norm_equals_llama_in_bfloat16():
    """Bit for bit in nearly all cases: the sum of squares has another order, so a rounding may
    fall the other way.
    """
    x, weight = torch.randn(64, 576).bfloat16(), torch.randn(576).bfloat16()
    wide = x.float()
    llama = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert (cpu_ops.rms_norm(x, weight, 1e-5) != llama).float().mean() < 1e-3


@DTYPES
@SIZES
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(dtype, size, with_bias):
    """Against float64; a tail lane must not count as a value of 0 - mean."""
    x, weight = guarded(5, size, dtype), torch.randn(size).to(dtype)
    bias = torch.randn(size).to(dtype) if with_bias else None
    expected = F.layer_norm(
        x.double(), (size,), weight.double(), None if bias is None else bias.double(), 1e-5
    )
    near(cpu_ops.layer_norm(x, weight, bias, 1e-5), expected, slack=3)
    residual = guarded(5, size, dtype)
    total = x + residual
    out = cpu_ops.layer_norm(x, weight, bias, 1e-5, residual=residual)
    assert torch.equal(residual, total) and torch.equal(
        out, cpu_ops.layer_norm(total, weight, bias, 1e-5)
    )


GATES = {
    "silu_and_mul": F.silu,
    "gelu_and_mul": F.gelu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
}


@DTYPES
@SIZES
@pytest.mark.parametrize("name", GATES)
def test_gated_activations(dtype, size, name):
    """Far tails included: exp must neither overflow to NaN nor lose what is small."""
    x = guarded(5, 2 * size, dtype)
    x[:, 0] = torch.tensor([-60.0, -9.0, 0.0, 9.0, 300.0])
    gate, up = x.double().chunk(2, dim=-1)
    near(getattr(cpu_ops, name)(x), GATES[name](gate) * up)


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@DTYPES
@SIZES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(dtype, size, name):
    """Far tails included, rows that lie apart, and a shape of more dimensions."""
    x = guarded(5, size, dtype)
    x[:, 0] = torch.tensor([-60.0, -9.0, 0.0, 9.0, 300.0])
    activate = getattr(cpu_ops, name)
    out = activate(x)
    near(out, ACTIVATIONS[name](x.double()))
    assert out.is_contiguous()
    assert torch.equal(activate(x.contiguous().view(1, 5, size)), out[None])


@DTYPES
@SIZES
@pytest.mark.parametrize("offset", [0, 2])
def test_rows_of_a_table_are_added_as_torch_does(dtype, size, offset):
    """Bit for bit. Fault: the offset counted in bytes, or an index that has no row read anyway."""
    x, table = guarded(5, size, dtype), torch.randn(9, size).to(dtype)
    indices = torch.tensor([6, 0, 3, 3, 5])
    out = cpu_ops.add_table_rows(x, indices, table, offset)
    assert torch.equal(out, x + table[indices + offset])
    assert torch.equal(cpu_ops.add_table_rows(x[:0], indices[:0], table), x[:0])
    for wrong in (9 - offset, -1 - offset):
        with pytest.raises(IndexError, match="of a table of 9"):
            cpu_ops.add_table_rows(x[:1], torch.tensor([wrong]), table, offset)
    with pytest.raises(ValueError, match="int64 for 5 rows"):
        cpu_ops.add_table_rows(x, indices.int(), table)
    with pytest.raises(ValueError, match="does not fit a table"):
        cpu_ops.add_table_rows(x, indices, table.double())


def turned(x, cos, sin, is_neox):
    first, second = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
    a, b = first * cos - second * sin, second * cos + first * sin
    return torch.cat((a, b), -1) if is_neox else torch.stack((a, b), -1).flatten(-2)


def rotary_case(dtype, head_size, rotary_dim, tokens=19):
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.rand(50, rotary_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = torch.randn(tokens, 3 + 2 + 2, head_size).to(dtype)
    return positions, table, qkv


def expected_rotary(x, positions, table, is_neox):
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    rotary_dim = table.shape[1]
    return torch.cat(
        (turned(x[..., :rotary_dim].double(), cos, sin, is_neox), x[..., rotary_dim:].double()), -1
    )


@DTYPES
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("head_size,rotary_dim", [(64, 64), (80, 32), (20, 12), (128, 128)])
def test_rotary_embedding(dtype, is_neox, head_size, rotary_dim):
    """In place on views of a fused buffer: values stay, and so do dimensions beyond rotary_dim."""
    positions, table, qkv = rotary_case(dtype, head_size, rotary_dim)
    expected = expected_rotary(qkv, positions, table, is_neox)
    values = qkv[:, 5:].clone()
    flat = qkv.flatten(1)
    query, key = flat[:, : 3 * head_size], flat[:, 3 * head_size : 5 * head_size]
    cpu_ops.rotary_embedding(positions, query, key, head_size, table, is_neox)
    near(qkv[:, :5], expected[:, :5], slack=2)
    assert torch.equal(qkv[:, 5:], values)
    again = qkv.clone()
    cpu_ops.rotary_embedding(positions, again[:, :3], None, head_size, table, is_neox)
    assert torch.equal(again[:, 3:], qkv[:, 3:]) and not torch.equal(again[:, :3], qkv[:, :3])


@DTYPES
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotary_and_cache_equals_the_two_passes(dtype, is_neox, rotary_dim):
    """Same bits in query and cache; skipped tokens leave the cache alone, but their query is
    turned.
    """
    positions, table, qkv = rotary_case(dtype, 64, rotary_dim)
    slots = torch.randperm(32)[:19]
    slots[3] = -1
    one, two = (
        torch.zeros(4, 2, 8, 128, dtype=dtype),
        torch.zeros(4, 8, 2, 128, dtype=dtype).transpose(1, 2),
    )
    split = qkv.clone()
    cpu_ops.rotary_embedding(positions, split[:, :3], split[:, 3:5], 64, table, is_neox)
    reshape_and_cache(split[:, 3:5], split[:, 5:], *key_value_views(one), slots)
    key = qkv[:, 3:].clone()
    cpu_ops.rotary_and_cache(
        positions,
        qkv[:, :3],
        qkv[:, 3:5],
        qkv[:, 5:],
        64,
        table,
        *key_value_views(two),
        slots,
        is_neox,
    )
    assert torch.equal(qkv[:, :3], split[:, :3]) and torch.equal(one, two)
    assert torch.equal(qkv[:, 3:], key)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (130, 50), (33, 1536), (4, 2)])
@pytest.mark.parametrize("rows", [1, 3, 4, 8])
def test_gemv(dtype, shape, rows):
    """Any N and K, odd tails too; x a slice of a wider buffer."""
    n, k = shape
    x, weight = guarded(rows, k, dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype)
    product = x.double() @ weight.double().T
    scale = (x.double().abs() @ weight.double().abs().T).clamp(min=1)
    for b in (None, bias):
        expected = product if b is None else product + b.double()
        error = (cpu_ops.gemv(x, weight, b).double() - expected).abs() / (scale + expected.abs())
        assert error.max() <= TOLERANCE[dtype]
    near(cpu_ops.linear(x[None].contiguous(), weight, bias)[0], product + bias.double(), slack=40)


@DTYPES
def test_gemv_rows_do_not_depend_on_each_other(dtype):
    """A row's product has the same bits alone and among others: up to the crossover, decode
    batches change nothing.
    """
    x, weight = torch.randn(8, 576).to(dtype), torch.randn(100, 576).to(dtype)
    together = cpu_ops.gemv(x, weight)
    for i in range(8):
        assert torch.equal(cpu_ops.gemv(x[i : i + 1], weight)[0], together[i])


def test_many_rows_use_all_threads_and_change_no_bit(monkeypatch):
    """Rows are shared among threads, each worked out as if alone."""
    from vllm.model_executor.layers.cpu_ops import threads

    x, weight = torch.randn(3000, 576), torch.randn(576)
    monkeypatch.setattr(threads, "_num_threads", 1)
    expected = cpu_ops.rms_norm(x, weight, 1e-5), cpu_ops.silu_and_mul(x)
    for count in (2, 5):
        monkeypatch.setattr(threads, "_num_threads", count)
        assert torch.equal(cpu_ops.rms_norm(x, weight, 1e-5), expected[0])
        assert torch.equal(cpu_ops.silu_and_mul(x), expected[1])


def test_no_rows():
    """An empty batch is not an error."""
    assert cpu_ops.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert cpu_ops.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    assert cpu_ops.linear(torch.empty(0, 8), torch.ones(3, 8)).shape == (0, 3)
    table = torch.ones(4, 8)
    cpu_ops.rotary_embedding(
        torch.empty(0, dtype=torch.int64), torch.empty(0, 16), torch.empty(0, 8), 8, table
    )


def test_wrong_arguments_are_refused():
    """Each refusal names what was wrong instead of reading past a buffer."""
    with pytest.raises(ValueError, match="does not fit weight"):
        cpu_ops.rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5)
    with pytest.raises(ValueError, match="does not fit weight"):
        cpu_ops.gemv(torch.ones(2, 8), torch.ones(3, 8).bfloat16())
    with pytest.raises(ValueError, match="cos_sin_cache must be float32"):
        cpu_ops.rotary_embedding(
            torch.zeros(2).long(), torch.ones(2, 8), None, 8, torch.ones(4, 8).bfloat16()
        )
    with pytest.raises(ValueError, match="at least 1"):
        cpu_ops.init_threads(0)


def test_a_second_process_finds_the_compiled_kernels(tmp_path):
    """Faults: a warm start compiles; numba is imported, and stays, where the engine is."""
    import os
    import subprocess
    import sys

    code = (
        "import sys, torch; from vllm.model_executor.layers import cpu_ops;"
        "cpu_ops.warmup(torch.float32);"
        "x = cpu_ops.rms_norm(torch.ones(2, 8), torch.ones(8), 0.0);"
        "assert torch.equal(x, torch.ones(2, 8));"
        "print('numba' in sys.modules)"
    )
    env = dict(os.environ, VLLM_CACHE_ROOT=str(tmp_path))
    runs = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.stdout.split()[-1] for run in runs] == ["False", "False"], runs
    assert ["Compiling" in run.stdout + run.stderr for run in runs] == [True, False], runs


def test_kernels_compiled_beside(tmp_path, monkeypatch):
    """Fault: the process keeps its code elsewhere than `load` looks for it, or one is started on
    every start."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    library = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
    process = compile_beside([library.missing("float32"), library.missing("float64")])
    assert process.wait(timeout=300) == 0
    (made,) = (tmp_path / "cpu_kernels").iterdir()
    assert library.missing("float32") is None
    assert compile_beside([library.missing("float32")]) is None
    written = made.stat().st_mtime_ns
    assert set(library.load("float32")) == {"run_program", "help_programs"}
    assert [made] == list((tmp_path / "cpu_kernels").iterdir())
    assert made.stat().st_mtime_ns == written


def test_nothing_is_compiled_beside_that_cannot_be_kept(tmp_path, monkeypatch):
    """Fault: each start compiles a library twice, first where its code is lost, then here."""
    library = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    assert compile_beside([library.missing("float32")]) is None
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "no_process"))
    monkeypatch.setattr(kernel_library.sys, "executable", str(tmp_path / "missing"))
    assert compile_beside([library.missing("float32")]) is None
    monkeypatch.setattr(kernel_library.os, "access", lambda path, mode: False)
    monkeypatch.setattr(kernel_library.subprocess, "Popen", None)  # not even tried
    assert compile_beside([library.missing("float32")]) is None


def test_kernels_are_compiled_here_where_no_process_can(tmp_path, monkeypatch):
    """Fault: no engine without a process of its own for the compiler, or other numbers."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(kernel_library.sys, "executable", str(tmp_path / "missing"))
    library = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
    assert set(library.load("float32")) == {"run_program", "help_programs"}
    assert library.missing("float32") is None


def test_a_compiler_that_fails_is_done_without(tmp_path, monkeypatch):
    """Fault: its error is the engine's."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(kernel_library.sys, "executable", "false")
    library = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
    assert set(library.load("float32")) == {"run_program", "help_programs"}


def test_a_failure_to_keep_code_leaves_nothing(tmp_path, monkeypatch, caplog_vllm):
    """Fault: each start on a full disk leaves one more temporary file."""

    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(kernel_library.os, "replace", full)
    kernel_library._keep(tmp_path / "kernels" / "x.o", b"code")
    assert not list((tmp_path / "kernels").iterdir())
    assert "no space left" in caplog_vllm.text


@pytest.mark.parametrize(("family", "counts"), [("x86", True), ("arm", False), ("", False)])
def test_time_stamps_only_where_programs_may_read_them(family, counts):
    """Fault: the kernels of a program end in an illegal instruction on a machine whose system keeps
    the counter to itself."""
    cycles = Simd(Target(8, False, "", "", family), "float32").cycles
    function = njit(lambda: cycles())
    function.compile(())
    (compiled,) = function.overloads.values()
    assert ("readcyclecounter" in compiled.library.get_llvm_str()) is counts

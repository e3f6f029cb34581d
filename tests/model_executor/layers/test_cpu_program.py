# SPDX-License-Identifier: Apache-2.0
"""Programs: launches noted once and run again without Python, with the bits of the plain path."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.cpu_ops import program_args
from vllm.model_executor.layers.cpu_ops.program import KernelProgram
from vllm.model_executor.layers.cpu_ops.target import host_target
from vllm.model_executor.layers.cpu_ops.threads import Recorder, Scratch, record
from vllm.v1.attention.ops.cpu import attend_args, key_value_views, launchers, paged_attention

SIZE, HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 64, 6, 2, 32, 16


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format, autouse=True)
def threads(request):
    """Three threads on two cores: one of them is always late."""
    before = cpu_ops.num_threads()
    cpu_ops.init_threads(request.param)
    yield request.param
    cpu_ops.init_threads(before)


def chain(x: torch.Tensor, weight: torch.Tensor, depth: int):
    """A run of dependent kernels: an entry that began too early, or work done twice, shows."""
    norm = torch.ones(SIZE, dtype=x.dtype)

    def run() -> torch.Tensor:
        y, residual = x, torch.empty_like(x)
        cpu_ops.rms_norm(x, norm, 1e-5, out=residual)
        for _ in range(depth):
            y = cpu_ops.gemv(y, weight)
            y = cpu_ops.fused_add_rms_norm(y, residual, norm, 1e-5)
        return y

    return run


@torch.inference_mode()
def test_replays_have_the_plain_bits(threads):
    """Fault: an entry begins before the one before it has ended, counters are cleared under a thread
    that still takes work, or two live tensors share memory."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, SIZE).bfloat16(), torch.randn(SIZE, SIZE).bfloat16() / 8
    run = chain(x, weight, depth=50)
    program = KernelProgram(run)
    for _ in range(30):
        x.copy_(torch.randn(3, SIZE))
        assert torch.equal(program.replay(), run())
    names = [name for name, _ in program.cycles()]
    assert names == ["rms_norm", *["gemv", "rms_norm"] * 50]


@torch.inference_mode()
def test_programs_take_turns(threads):
    """Fault: a helper that comes late, from the program before, works on the wrong one."""
    torch.manual_seed(0)
    weight = torch.randn(SIZE, SIZE).bfloat16() / 8
    inputs = [torch.randn(rows, SIZE).bfloat16() for rows in (1, 2, 4)]
    runs = [chain(x, weight, depth=3) for x in inputs]
    programs = [KernelProgram(run) for run in runs]
    expected = [run() for run in runs]
    for turn in range(300):
        which = turn * 7 % 3
        assert torch.equal(programs[which].replay(), expected[which])


@torch.inference_mode()
def test_attention_holds_for_later_lengths():
    """Recorded while requests are short: work, scratch and splits must follow the lengths at hand.

    Fault: keys beyond the recorded length are left out, or partial results overflow."""
    torch.manual_seed(0)
    requests, blocks = 3, 200
    cache = torch.randn(1 + requests * blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE).bfloat16()
    keys, values = key_value_views(cache)
    query = torch.randn(requests, HEADS, HEAD_SIZE).bfloat16()
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lengths = torch.ones(requests, dtype=torch.int32)
    table = 1 + torch.randperm(requests * blocks).int().view(requests, blocks)

    def run() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        paged_attention(query, keys, values, out, starts, lengths, table, 0.2)
        return out

    program = KernelProgram(run, requests, requests)
    long = blocks * BLOCK
    for new in ([1, 2, 3], [long, 1, 700], [long, long, 1000], [255, 256, 257], [5, 5, 5]):
        lengths.copy_(torch.tensor(new))
        query.normal_()
        assert torch.equal(program.replay(), run())


@torch.inference_mode()
def test_cross_attention_of_all_lengths():
    """Keys of another length than the queries', none too; several queries of a request. Fault: a
    request without keys reads a neighbour's, or those of the step before."""
    torch.manual_seed(0)
    requests, tokens, blocks = 3, 7, 40
    cache = torch.randn(1 + requests * blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE).bfloat16()
    keys, values = key_value_views(cache)
    query = torch.randn(tokens, HEADS, HEAD_SIZE).bfloat16()
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    lengths = torch.zeros(requests, dtype=torch.int32)
    table = 1 + torch.randperm(requests * blocks).int().view(requests, blocks)

    def run() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        paged_attention(query, keys, values, out, starts, lengths, table, 0.2, causal=False)
        return out

    program = KernelProgram(run, tokens, requests)
    for queries, new in (([1, 5, 1], [600, 0, 3]), ([2, 1, 4], [0, 640, 257]), ([7, 0, 0], [1, 0, 0])):
        starts[1:] = torch.tensor(queries).cumsum(0)
        lengths.copy_(torch.tensor(new))
        query.normal_()
        made = program.replay()
        assert torch.equal(made, run())
        for n, length, first in zip(queries, new, starts.tolist()):
            assert bool(made[first : first + n].any()) is (length > 0 and n > 0)


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "expected_rows"), [(0, 0), (20, 18), (30, 30), (48, 48)])
def test_partial_results_without_room(rows, expected_rows, monkeypatch):
    """Requests that cannot be split any more are computed whole, with the same bits. Fault: partial
    results beyond their memory, or another order of sums."""
    torch.manual_seed(0)
    blocks = 80
    cache = torch.randn(1 + 3 * blocks, KV_HEADS, BLOCK, 2 * HEAD_SIZE).bfloat16()
    keys, values = key_value_views(cache)
    query = torch.randn(3, HEADS, HEAD_SIZE).bfloat16()
    starts = torch.arange(4, dtype=torch.int32)
    # Split, they have 30, 0 and 18 rows: of 5, 1 and 3 chunks, 2 heads and 3 rows a chunk.
    lengths = torch.tensor([blocks * BLOCK, 1, 700], dtype=torch.int32)
    table = 1 + torch.randperm(3 * blocks).int().view(3, blocks)

    def run() -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        paged_attention(query, keys, values, out, starts, lengths, table, 0.2)
        return out

    expected, row_bytes = run(), launchers._partial_row_bytes(HEAD_SIZE)
    monkeypatch.setattr(launchers, "_MOST_PARTIAL_BYTES", rows * row_bytes)
    assert torch.equal(run(), expected)
    (partial_bytes,) = launchers._attend_args.read(attend_args.PARTIAL_BYTES, 1)
    lanes = host_target().lanes
    assert partial_bytes == expected_rows * 4 * (-(-HEAD_SIZE // lanes) * lanes + lanes)
    assert torch.equal(KernelProgram(run, 3, 3).replay(), expected)


@torch.inference_mode()
@pytest.mark.parametrize("requests", [1, 2, 40])
def test_a_recorded_attention_keeps_its_memory(requests, monkeypatch):
    """Also a first one, whose scratch is the smallest. Fault: it grows while the attention is noted,
    and the plan writes where the memory of before has been given to others."""
    for name in ("_plan_scratch", "_thread_scratch", "_partial_scratch", "_nothing_scratch"):
        monkeypatch.setattr(launchers, name, Scratch())
    keys, values = key_value_views(torch.zeros(2, 1, BLOCK, 2 * HEAD_SIZE).bfloat16())
    query = torch.randn(requests, 1, HEAD_SIZE).bfloat16()
    ints = torch.ones(requests + 1, dtype=torch.int32)
    table = torch.ones(requests, 40, dtype=torch.int32)
    recorder = Recorder()
    with record(recorder):
        for _ in range(2):  # two layers
            out = torch.empty_like(query)
            paged_attention(query, keys, values, out, ints, ints[1:], table, 0.2)
    kept = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in recorder.kept]
    nbytes = {
        attend_args.PREFIX: 8 * (2 * (requests + 1) + requests),
        attend_args.SCRATCH: 1,
        attend_args.PARTIAL: 4 * HEAD_SIZE * requests,
    }
    assert len(recorder.entries) == 4
    for _, args, *_ in recorder.entries:
        for word, size in nbytes.items():
            (first,) = args.read(word, 1)
            assert any(low <= first and first + size <= high for low, high in kept)


@torch.inference_mode()
def test_what_torch_computes_is_refused():
    """Fault: it is left out of the replays without a word."""
    x = torch.randn(2, SIZE).bfloat16()
    norm = torch.ones(SIZE).bfloat16()
    with pytest.raises(RuntimeError, match=r"torch computes aten\.add"):
        KernelProgram(lambda: cpu_ops.rms_norm(x, norm, 1e-5) + 1)
    table = torch.ones(4, SIZE).bfloat16()
    with pytest.raises(RuntimeError, match="not on tokens' rows"):  # and 4 is a multiple of 2
        KernelProgram(lambda: cpu_ops.rms_norm(table * 2.0, norm, 1e-5)[:2], 2)
    with pytest.raises(RuntimeError, match="nothing was launched"):
        KernelProgram(lambda: x)
    with record(Recorder()), pytest.raises(RuntimeError, match="another's recording"):
        KernelProgram(lambda: x)
    assert torch.isfinite(cpu_ops.rms_norm(x, norm, 1e-5)).all()  # and kernels run again


@torch.inference_mode()
def test_memory_is_used_again_only_when_free():
    """Fault: a tensor that is still read gets another's memory, or each layer takes memory of its
    own."""
    weight, norm = torch.eye(SIZE).bfloat16(), torch.ones(SIZE).bfloat16()
    x = torch.randn(2, SIZE).bfloat16()
    addresses: list[int] = []

    def run() -> torch.Tensor:
        kept = cpu_ops.gemv(x, weight)
        y = kept
        for _ in range(20):
            y = cpu_ops.gemv(y, weight)
            assert y.data_ptr() != kept.data_ptr()
            addresses.append(y.data_ptr())
        return cpu_ops.fused_add_rms_norm(y, kept, norm, 1e-5)

    KernelProgram(run)
    assert len(set(addresses)) == 2  # one that is read, one that is written


@torch.inference_mode()
def test_a_waiting_thread_sleeps(threads):
    """Helpers without a program take no time of the processor: a core that spins is one that others
    lack. Counted in the helpers' own record, not by a clock."""
    x, weight = torch.randn(1, SIZE).bfloat16(), torch.eye(SIZE).bfloat16()
    program = KernelProgram(chain(x, weight, depth=1))
    program.replay()
    if threads == 1:
        assert program._helpers is None
        return
    waiting = program._helpers._record
    event = threading.Event()
    for _ in range(1000):
        if waiting[program_args.WAITING // 8] == threads - 1:
            break
        event.wait(0.01)
    assert waiting[program_args.WAITING // 8] == threads - 1

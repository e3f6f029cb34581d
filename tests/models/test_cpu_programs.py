# SPDX-License-Identifier: Apache-2.0
"""Decode steps as programs of kernels, in the engine: the tokens of the unrecorded path, bit for bit
the same sums, whatever joins, leaves, is preempted or comes from the prefix cache meanwhile."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.models.test_tiny import small_pool
from tests.models.tiny import NATIVE, VOCAB_SIZE, Family, make_model

from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.cpu_ops.packing import can_pack
from vllm.model_executor.layers.cpu_ops.threads import Scratch
from vllm.v1.attention.ops.cpu import launchers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

# Sizes that weights can be packed for, so that every product is a kernel's.
SHAPE = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=VOCAB_SIZE + 29)
FAMILIES = {
    "llama": Family("llama", dict(SHAPE, tie_word_embeddings=True)),
    "qwen3": Family("qwen3", dict(SHAPE, head_dim=16)),
    "gemma3": Family("gemma3_text", dict(NATIVE["gemma3"].config, **{**SHAPE, "head_dim": 16})),
    "gpt2": Family("gpt2", SHAPE, NATIVE["gpt2"].names),
    "qwen2": Family("qwen2", dict(SHAPE, use_sliding_window=True, sliding_window=21)),
}
# The longest passes the 256 keys of which an attention's parts are made; others cross pages.
LENGTHS = (250, 15, 40, 3, 100)
NUM_NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def make_llm(folder: Path, **options) -> LLM:
    defaults = dict(
        dtype="bfloat16",
        max_model_len=320,
        max_num_batched_tokens=80,
        kv_cache_memory_bytes=8 << 20,
    )
    return LLM(model=str(folder), skip_tokenizer_init=True, **{**defaults, **options})


def params() -> list[SamplingParams]:
    """Requests of several lengths, so that batches shrink; some sample, one wants logprobs."""
    common = dict(ignore_eos=True)
    return [
        SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, **common),
        SamplingParams(temperature=0.8, seed=7, top_p=0.9, max_tokens=NUM_NEW_TOKENS - 3, **common),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=NUM_NEW_TOKENS - 9, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=NUM_NEW_TOKENS, **common),
        SamplingParams(temperature=1.0, seed=1, max_tokens=5, **common),
    ]


def run(llm: LLM) -> list:
    """Tokens and logprobs of all prompts together, then of the first alone, then of all again with
    what is cached."""
    inputs = [{"prompt_token_ids": ids} for ids in prompts()]
    outputs = llm.generate(inputs, params(), use_tqdm=False)
    outputs += llm.generate(inputs[:1], params()[:1], use_tqdm=False)
    outputs += llm.generate(inputs, params(), use_tqdm=False)
    outs = [output.outputs[0] for output in outputs]
    values = [
        [sorted((token, one.logprob) for token, one in step.items()) for step in out.logprobs]
        for out in outs
        if out.logprobs
    ]
    return [[list(out.token_ids) for out in outs], values]


def runner_of(llm: LLM) -> GPUModelRunner:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner


def count_replays(llm: LLM, monkeypatch) -> list[tuple[int, int]]:
    """(requests, tokens) of the batches that were replayed, as they come."""
    graphs, sizes = runner_of(llm).graphs, []
    replay = graphs.replay

    def counted(batch):
        sizes.append((batch.num_reqs, batch.num_tokens))
        return replay(batch)

    monkeypatch.setattr(graphs, "replay", counted)
    return sizes


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make_model(FAMILIES[name], folder)
        return folder

    return make


needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(32, 32, dtype=torch.bfloat16)),
    reason="this CPU's products of many rows are torch's",
)


@needs_packing
@pytest.mark.parametrize("name", FAMILIES)
def test_programs_change_nothing(name, folder, monkeypatch):
    """Fault: a recording keeps a number of the step it was made in: a length, a slot, a position,
    a table of pages, a tensor whose memory is another's by now."""
    path = folder(name)
    expected = run(make_llm(path, enforce_eager=True))
    llm = make_llm(path)
    replays = count_replays(llm, monkeypatch)
    assert run(llm) == expected
    assert {1, 2, 3, 4} <= {reqs for reqs, tokens in replays if reqs == tokens}
    assert any(tokens > reqs > 1 for reqs, tokens in replays)  # single tokens beside a prompt's
    small = make_llm(path, num_gpu_blocks_override=small_pool(llm) + 20)
    assert run(small) == expected


def replay_logits(llm: LLM, monkeypatch) -> list[int]:
    """Rows of the logits that are replayed, as they come."""
    graph, rows = runner_of(llm).graphs._logits, []
    replay = graph.replay

    def counted(num_rows):
        rows.append(num_rows)
        return replay(num_rows)

    monkeypatch.setattr(graph, "replay", counted)
    return rows


@needs_packing
def test_logits_are_recorded_too(folder, monkeypatch):
    """With a vocabulary that is padded, so that their rows have gaps; of steps of which some requests
    get no token, and of more rows than were recorded. Fault: rows of other requests, padding that
    is drawn, or a step whose logits nobody computes."""
    path = folder("llama")
    expected = run(make_llm(path, enforce_eager=True))
    llm = make_llm(path)
    rows = replay_logits(llm, monkeypatch)
    assert run(llm) == expected
    assert {1, 2, 3, 4} <= set(rows)
    rows.clear()
    runner_of(llm).graphs._logits.max_num_rows = 2
    assert run(llm) == expected
    assert set(rows) == {1, 2}


@needs_packing
def test_capped_logits_run_without(tmp_path):
    """torch caps them. Fault: the whole step, or the start, fails for it."""
    capped = Family("gemma2", dict(NATIVE["gemma2"].config, **{**SHAPE, "head_dim": 16}))
    make_model(capped, tmp_path)
    llm = make_llm(tmp_path)
    graphs = runner_of(llm).graphs
    assert graphs.max_num_tokens > 8 and graphs._logits is None
    assert run(llm) == run(make_llm(tmp_path, enforce_eager=True))


@needs_packing
def test_one_request_at_a_time(folder, monkeypatch):
    """The smallest records of an attention there are, in a process without larger ones. Fault: the
    program's plan writes to memory that was freed while it was recorded."""
    for name in ("_plan_scratch", "_thread_scratch", "_partial_scratch", "_nothing_scratch"):
        monkeypatch.setattr(launchers, name, Scratch())
    path = folder("llama")
    expected = run(make_llm(path, enforce_eager=True, max_num_seqs=1))
    for name in ("_plan_scratch", "_nothing_scratch"):
        monkeypatch.setattr(launchers, name, Scratch())
    llm = make_llm(path, max_num_seqs=1)
    replays = count_replays(llm, monkeypatch)
    assert run(llm) == expected
    assert {reqs for reqs, _ in replays} == {1}


def test_plain_weights_in_programs_of_few_rows(folder, monkeypatch, caplog_vllm):
    """Where products of many rows are torch's, as on CPUs without AVX512_BF16 (*emulated*): steps of
    few tokens are recorded, larger ones run without. Fault: one is taken for the other."""
    monkeypatch.setattr(cpu_ops, "can_pack", lambda weight: False)
    path = folder("llama")
    expected = run(make_llm(path, enforce_eager=True))
    llm = make_llm(path)
    assert runner_of(llm).graphs.max_num_tokens == 8
    assert "Steps of more than 8 tokens run without a graph: torch computes" in caplog_vllm.text
    replays = count_replays(llm, monkeypatch)
    assert run(llm) == expected
    assert {1, 2, 3, 4} <= {tokens for _, tokens in replays} and max(replays)[1] <= 8


@pytest.mark.parametrize("asked", [False, True])
def test_float32_runs_without(asked, folder, caplog_vllm):
    """Products in float32 are torch's: the model runs. Fault: a user who asked for graphs is not
    warned, or one is who did not."""
    options = dict(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}) if asked else {}
    llm = make_llm(folder("llama"), dtype="float32", **options)
    (told,) = [r for r in caplog_vllm.records if "No graphs are recorded" in r.getMessage()]
    assert told.levelname == ("WARNING" if asked else "INFO")
    assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode is (
        CUDAGraphMode.FULL_DECODE_ONLY
    )
    run(llm)
    assert runner_of(llm).graphs.max_num_tokens == 0


@needs_packing
def test_weights_that_are_replaced(folder, monkeypatch):
    """Fault: the program goes on with those of the start, or with what lies there after them."""

    def replace(model) -> None:
        weight = model.model.norm.weight
        weight.data = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype)

    path = folder("llama")
    eager, llm = make_llm(path, enforce_eager=True), make_llm(path)
    before = run(llm)
    for one in (eager, llm):
        one.apply_model(replace)
    replays = count_replays(llm, monkeypatch)
    after = run(llm)
    assert after == run(eager) and after != before
    assert replays
    graphs = runner_of(llm).graphs
    llm.apply_model(lambda model: None)
    assert runner_of(llm).graphs is graphs  # nothing changed
    # And where nobody is told, what the program reads is not freed.
    weight = runner_of(llm).model.model.norm.weight
    address, weight.data = weight.data_ptr(), torch.ones_like(weight)
    assert address != weight.data_ptr()
    assert address in [kept.data_ptr() for kept in graphs._weights]


@needs_packing
def test_engines_of_several_threads(folder):
    """Fault: they write each other's scratch memory, argument records or results, which is the
    process's, as a program runs without the GIL."""
    names = ["llama", "qwen3"]
    llms = [make_llm(folder(name)) for name in names]
    expected = [run(llm) for llm in llms]
    with ThreadPoolExecutor(len(llms)) as pool:
        for _ in range(3):
            assert list(pool.map(run, llms)) == expected


@pytest.mark.parametrize("asked", [False, True])
def test_eagerly_without_a_word(asked, folder, caplog_vllm):
    """Fault: `enforce_eager` is said to go against graphs that nobody asked for."""
    options = dict(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}) if asked else {}
    make_llm(folder("llama"), enforce_eager=True, **options)
    assert ("FULL_DECODE_ONLY asks for them" in caplog_vllm.text) is asked


@needs_packing
def test_other_threads(folder):
    """Fault: results that depend on who took which piece of work."""
    path, before = folder("llama"), cpu_ops.num_threads()
    try:
        results = []
        for threads in (1, 3):
            llm = make_llm(path)
            cpu_ops.init_threads(threads)
            results.append(run(llm))
        assert results[0] == results[1]
    finally:
        cpu_ops.init_threads(before)

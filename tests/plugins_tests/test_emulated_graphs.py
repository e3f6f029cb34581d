# SPDX-License-Identifier: Apache-2.0
"""Decode steps from graphs, on the emulated CUDA platform, whose graph launches again what was launched
while it was recorded, at the same addresses, and runs no Python: what is not in the static inputs, or
follows from the batch on the host, comes out wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.models.tiny import NATIVE, VOCAB_SIZE, Family, generate, make_model
from tests.plugins_tests.emulated import Job
from tests.plugins_tests.machines import Machine, make_machines
from tests.plugins_tests.test_emulated_platforms import two_groups
from vllm.triton_utils import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"),
]

PAGE_TOKENS, NUM_NEW_TOKENS, STAGGER = 8, 22, 4
# The first request leaves the others no room, which then come together.
PROMPT_LENGTHS = (80, 17, 9, 24, 5)
# Batches of 2 are padded, those of more than 3 have no graph.
SIZES = [1, 3]
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
ENGINE_ARGS = dict(
    dtype="float32",
    # Keys of a decode are split in two where any request may be so long.
    max_model_len=300,
    block_size=PAGE_TOKENS,
    # The five requests cannot all stay: pages of one become another's.
    num_gpu_blocks_override=14,
    max_num_batched_tokens=40,
    max_num_seqs=5,
    kv_cache_memory_bytes=1 << 24,
    enable_prefix_caching=False,
)


class Case:
    """A model, prompts, and what Transformers generates, the last request the least."""

    def __init__(self, family: Family, folder: Path) -> None:
        rng = random.Random(2)
        self.folder = folder
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
        longest = generate(make_model(family, folder), self.prompts, NUM_NEW_TOKENS)
        self.expected = [ids[: NUM_NEW_TOKENS - i * STAGGER] for i, ids in enumerate(longest)]

    def job(self, engine_args: dict = {}, **changes) -> Job:  # noqa: B006
        args = {**ENGINE_ARGS, "compilation_config": GRAPHS, **engine_args}
        changes = {"stagger": STAGGER, "graphs": True, **changes}
        return Job(str(self.folder), self.prompts, NUM_NEW_TOKENS, args, **changes)


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> dict[str, Machine]:
    return make_machines(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Case:
    return Case(NATIVE["llama"], tmp_path_factory.mktemp("llama"))


def check_batches(replays: list[int]) -> None:
    """Batches grew and shrank across the sizes, padded and not."""
    assert set(replays) == {1, 2, 3}
    changes = {(before, after) for before, after in zip(replays, replays[1:])}
    assert any(a < b for a, b in changes) and any(a > b for a, b in changes)


def test_a_llama_from_graphs(machines, llama):
    """Transformers' tokens; `--enforce-eager` gives the same without a replay."""
    graphs, eager = machines["cuda"].run(llama.job(), llama.job({"enforce_eager": True}))
    assert graphs.tokens == llama.expected, graphs.error
    check_batches(graphs.replays)
    assert eager.tokens == llama.expected and eager.replays == []


def test_two_kv_cache_groups_from_graphs(machines, tmp_path):
    """Full and sliding layers have block tables and slots of their own."""
    case = Case(two_groups(2), tmp_path)
    (result,) = machines["cuda"].run(case.job({"num_gpu_blocks_override": 26}))
    assert result.tokens == case.expected, result.error
    assert len(set(result.replays)) > 1


@pytest.mark.parametrize("name", ["input_ids", "positions", "seq_lens", "slots", "blocks"])
def test_each_input_must_be_copied(machines, llama, name):
    """If tokens came out right without, the tests above would prove nothing."""
    (result,) = machines["cuda"].run(llama.job(not_copied=name))
    assert result.replays and not result.error and result.tokens != llama.expected


def test_a_backend_that_cannot_be_recorded_runs_without(machines, llama):
    """The host's kernels are launched from the host's own tables: no graph, the same tokens."""
    (result,) = machines["cuda"].run(llama.job({"attention_backend": "CPU_ATTN"}))
    assert result.tokens == llama.expected and result.replays == []


def test_a_platform_without_graphs_refuses(machines, llama):
    """At start, by name, and says what it supports."""
    (result,) = machines["rocm"].run(llama.job())
    assert f"{result.device} has no graphs (supported: NONE)" in result.error


def test_a_model_that_the_host_cannot_record_runs_without(machines, llama):
    """torch's float32 products are no kernels of a program."""
    (result,) = machines["cpu"].run(llama.job(graphs=False))
    assert result.tokens == llama.expected, result.error

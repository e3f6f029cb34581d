# SPDX-License-Identifier: Apache-2.0
"""The GPUs' path through the engine, whole: platform, worker, runner, backends and kernels, on the host
in Triton's interpreter. Tokens equal Transformers' and the CPU platform's, whichever two backends
share an allocation."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.models.tiny import NATIVE, VOCAB_SIZE, Family, generate, make_model
from tests.plugins_tests.emulated import Job
from tests.plugins_tests.machines import Machine, make_machines
from vllm.triton_utils import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"),
]

FULL, SLIDING = "full_attention", "sliding_attention"
PAGE_TOKENS, NUM_NEW_TOKENS = 8, 20
# A pool in which the three requests cannot all stay: pages of one group become another's.
NUM_PAGES = 20
PROMPT_LENGTHS = (PAGE_TOKENS - 1, 2 * PAGE_TOKENS + 1, 3 * PAGE_TOKENS)
ENGINE_ARGS = dict(
    dtype="float32",
    max_model_len=64,
    block_size=PAGE_TOKENS,
    num_gpu_blocks_override=NUM_PAGES,
    max_num_batched_tokens=24,
    kv_cache_memory_bytes=1 << 24,
    enable_prefix_caching=False,
)
# A backend and how its blocks are laid out.
BACKENDS = ("ROCM_ATTN", "TRITON_ATTN", "TRITON_ATTN HND", "CPU_ATTN", "TORCH_ATTN")
PAIRS = [
    pair for pair in itertools.combinations(BACKENDS, 2) if pair != ("TRITON_ATTN", "TRITON_ATTN HND")
]
K_FIRST_PAIRS = [pair for pair in PAIRS if "ROCM_ATTN" in pair]


def two_groups(num_kv_heads: int) -> Family:
    """A Gemma 3 whose sliding layer and full layer share one allocation."""
    return Family(
        "gemma3_text",
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=11,
            layer_types=[SLIDING, FULL],
            tie_word_embeddings=False,
        ),
    )


class Case:
    """A model, prompts, and what Transformers generates."""

    def __init__(self, family: Family, folder: Path) -> None:
        rng = random.Random(1)
        self.folder = folder
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in PROMPT_LENGTHS]
        self.expected = generate(make_model(family, folder), self.prompts, NUM_NEW_TOKENS)
        assert all(len(set(tokens)) > 3 for tokens in self.expected), "would prove nothing"

    def job(self, **changes) -> Job:
        return Job(str(self.folder), self.prompts, NUM_NEW_TOKENS, ENGINE_ARGS, **changes)

    def mixed(self, full: str, sliding: str, **changes) -> Job:
        kinds = {"full_attention": full.split()[0], "sliding_window": sliding.split()[0]}
        layout = "HND" if "HND" in full + sliding else "NHD"
        return self.job(backend_per_kind=kinds, layout=layout, **changes)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(two_groups(2), tmp_path_factory.mktemp("two_groups"))


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> dict[str, Machine]:
    return make_machines(tmp_path_factory.mktemp("machines"))


def test_a_llama_on_each_platform(machines, tmp_path):
    """The whole path, with the platform's own choice of backend. One KV cache group."""
    case = Case(NATIVE["llama"], tmp_path)
    chosen = {"cpu": "CPU_ATTN", "rocm": "ROCM_ATTN", "cuda": "TRITON_ATTN"}
    for name, backend in chosen.items():
        (result,) = machines[name].run(case.job())
        assert result.tokens == case.expected, name
        assert result.device == {"cpu": "cpu"}.get(name, f"emulated_{name}")
        assert set(result.backends.values()) == {backend}
        assert result.worker.endswith("cpu_worker" if name == "cpu" else "gpu_worker")


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_two_groups_with_each_platforms_choice(machines, tmp_path, num_kv_heads):
    """Full and sliding layers of one backend: what the CPU platform and Transformers generate."""
    case = Case(two_groups(num_kv_heads), tmp_path)
    for machine in machines.values():
        (result,) = machine.run(case.job())
        assert result.tokens == case.expected, result.device


def test_every_pair_of_backends_over_one_allocation(machines, case):
    """Each pair on the emulated ROCm platform, K/V-first, blocks-first (NHD and HND) and fused: both
    groups are busy, pages are recycled between them, prompts come in chunks beside decodes."""
    results = machines["rocm"].run(*(case.mixed(*pair) for pair in PAIRS))
    for pair, result in zip(PAIRS, results):
        assert set(result.backends.values()) == {name.split()[0] for name in pair}, result.error
        assert result.tokens == case.expected, pair


def test_pages_of_several_kernel_blocks(machines, case):
    """Kernel blocks of 4 tokens in one group, 2 or 8 in the other: block ids of one are not those of
    the other, pages are."""
    pairs = [(full, "ROCM_ATTN") for full in ("TRITON_ATTN", "TRITON_ATTN HND", "CPU_ATTN")]
    sizes = [{"ROCM_ATTN": 4}, {"ROCM_ATTN": 2, "TRITON_ATTN": 4}, {"CPU_ATTN": 4}]
    jobs = [case.mixed(*pair, kernel_blocks=size) for pair, size in zip(pairs, sizes)]
    for job, result in zip(jobs, machines["rocm"].run(*jobs)):
        assert result.tokens == case.expected, (job.kernel_blocks, result.error)


def test_every_pair_of_backends_that_cuda_has(machines, case):
    pairs = [pair for pair in PAIRS if "ROCM_ATTN" not in pair]
    for pair, result in zip(pairs, machines["cuda"].run(*(case.mixed(*pair) for pair in pairs))):
        assert result.tokens == case.expected, (pair, result.error)


def test_without_alignment_the_pairs_fail(machines, case):
    """What alignment is for. Without it the start is refused, since views collide; without that
    check too the text is garbage. If this came out right, the tests above would prove nothing."""
    refused = machines["rocm"].run(*(case.mixed(*pair, align=False) for pair in K_FIRST_PAIRS))
    assert all("layers.0" in result.error and "layers.1" in result.error for result in refused)
    unchecked = [case.mixed(*pair, align=False, check=False) for pair in K_FIRST_PAIRS]
    for pair, result in zip(K_FIRST_PAIRS, machines["rocm"].run(*unchecked)):
        assert result.tokens and result.tokens != case.expected, pair


def test_quantised_caches(machines, case):
    """int8 with a scale for each token and head, in both layouts that have kernels for it: the bytes
    are a quarter, scales and all, and most tokens stay."""
    args = ENGINE_ARGS | {"kv_cache_dtype": "int8_per_token_head"}
    jobs = [
        Job(str(case.folder), case.prompts, NUM_NEW_TOKENS, args, kinds)
        for kinds in (
            {"full_attention": "ROCM_ATTN", "sliding_window": "TRITON_ATTN"},
            {"full_attention": "TRITON_ATTN", "sliding_window": "TRITON_ATTN"},
        )
    ]
    mixed, alone = machines["rocm"].run(*jobs)
    assert mixed.tokens == alone.tokens and not mixed.error
    same = [got[:4] == wanted[:4] for got, wanted in zip(alone.tokens, case.expected)]
    assert sum(same) >= 2
    (refused,) = machines["cpu"].run(Job(str(case.folder), case.prompts, NUM_NEW_TOKENS, args))
    assert "int8_per_token_head is not supported" in refused.error

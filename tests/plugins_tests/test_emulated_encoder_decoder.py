# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder model on the GPUs' path, whole, on the host in Triton's interpreter:
self-attention and cross-attention of a layer lie in one allocation, on whichever two backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models.tiny_encoder_decoder import BOS, START, generate, make_bart, random_ids
from tests.plugins_tests.emulated import Job
from tests.plugins_tests.machines import Machine, make_machines
from vllm.triton_utils import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"),
]

TRAINED = Path(__file__).parents[1] / "models" / "bart"
PAGE_TOKENS, NUM_NEW_TOKENS = 8, 12
TEXTS = random_ids(PAGE_TOKENS - 1, 2 * PAGE_TOKENS + 1, 3 * PAGE_TOKENS)
PROMPTS = [[START, BOS], [START, *random_ids(PAGE_TOKENS, seed=1)[0]], [START]]
ENGINE_ARGS = dict(
    dtype="float32",
    max_model_len=32,
    block_size=PAGE_TOKENS,
    # The three requests cannot all stay: pages of one group become another's.
    num_gpu_blocks_override=13,
    max_num_batched_tokens=24,
    kv_cache_memory_bytes=1 << 24,
    enable_prefix_caching=False,
)
# (self-attention, cross-attention). K/V-first beside blocks-first, NHD and HND, and beside fused;
# then the pairs without K/V-first.
K_FIRST_PAIRS = [
    ("ROCM_ATTN", cross) for cross in ("TRITON_ATTN", "TRITON_ATTN HND", "CPU_ATTN", "TORCH_ATTN")
]
OTHER_PAIRS = [
    ("TRITON_ATTN", "CPU_ATTN"),
    ("CPU_ATTN", "TRITON_ATTN HND"),
    ("TORCH_ATTN", "TRITON_ATTN"),
    ("CPU_ATTN", "TORCH_ATTN"),
]


class Case:
    """A model, requests, and what Transformers generates."""

    def __init__(self, folder) -> None:
        self.folder = make_bart(folder, max_position_embeddings=4 * PAGE_TOKENS)
        self.expected = generate(folder, TEXTS, PROMPTS, NUM_NEW_TOKENS)
        assert sum(len(set(tokens)) for tokens in self.expected) > 9, "would prove nothing"

    def job(self, **changes) -> Job:
        engine_args = ENGINE_ARGS | changes.pop("engine_args", {})
        return Job(
            str(self.folder), PROMPTS, NUM_NEW_TOKENS, engine_args, texts=TEXTS, **changes
        )

    def mixed(self, own: str, cross: str, **changes) -> Job:
        kinds = {"full_attention": own.split()[0], "cross_attention": cross.split()[0]}
        layout = "HND" if "HND" in own + cross else "NHD"
        return self.job(backend_per_kind=kinds, layout=layout, **changes)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> dict[str, Machine]:
    return make_machines(tmp_path_factory.mktemp("machines"))


def kinds(backends: dict[str, str]) -> tuple[set[str], set[str]]:
    """(backends of self-attention, of cross-attention)."""
    cross = {backend for name, backend in backends.items() if "encoder_attn" in name}
    return {b for name, b in backends.items() if "encoder_attn" not in name}, cross


def test_each_platforms_choice(machines, case):
    """ROCm keeps ROCM_ATTN for self-attention and takes another for cross-attention; the others have
    one backend for both. With prefix caching here, without in the tests below."""
    chosen = {
        "cpu": ({"CPU_ATTN"}, {"CPU_ATTN"}),
        "rocm": ({"ROCM_ATTN"}, {"TRITON_ATTN"}),
        "cuda": ({"TRITON_ATTN"}, {"TRITON_ATTN"}),
    }
    for name, backends in chosen.items():
        (result,) = machines[name].run(case.job(engine_args={"enable_prefix_caching": True}))
        assert result.tokens == case.expected, (name, result.error)
        assert kinds(result.backends) == backends


def test_every_pair_of_backends_over_one_allocation(machines, case):
    """K/V-first self-attention beside blocks-first and beside fused cross-attention, and the rest:
    what the CPU platform and Transformers generate."""
    pairs = K_FIRST_PAIRS + OTHER_PAIRS
    results = machines["rocm"].run(*(case.mixed(*pair) for pair in pairs))
    for (own, cross), result in zip(pairs, results):
        assert kinds(result.backends) == ({own.split()[0]}, {cross.split()[0]}), result.error
        assert result.tokens == case.expected, (own, cross)


def test_every_pair_of_backends_that_cuda_has(machines, case):
    results = machines["cuda"].run(*(case.mixed(*pair) for pair in OTHER_PAIRS))
    for (own, cross), result in zip(OTHER_PAIRS, results):
        assert kinds(result.backends) == ({own.split()[0]}, {cross.split()[0]}), result.error
        assert result.tokens == case.expected, (own, cross)


def test_a_trained_model(machines):
    """Not random weights, whose tokens say little of each other: dates in, dates out, K/V-first beside
    blocks-first and beside fused."""
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in ("17. März 1984", "the 21st of October, 2015")]
    prompts = [[START, BOS]] * len(texts)
    expected = generate(TRAINED, texts, prompts, NUM_NEW_TOKENS)
    jobs = [
        Job(
            str(TRAINED), prompts, NUM_NEW_TOKENS, ENGINE_ARGS | {"num_gpu_blocks_override": 40},
            texts=texts,
            backend_per_kind={"full_attention": "ROCM_ATTN", "cross_attention": cross},
        )
        for cross in ("TRITON_ATTN", "CPU_ATTN")
    ]  # fmt: skip
    for result in machines["rocm"].run(*jobs):
        assert result.tokens == expected, result.error


def test_pages_of_several_kernel_blocks(machines, case):
    """Kernel blocks of another size in each group."""
    sizes = [{"ROCM_ATTN": 2, "TRITON_ATTN": 4}, {"CPU_ATTN": 4}]
    pairs = [K_FIRST_PAIRS[1], K_FIRST_PAIRS[2]]
    jobs = [case.mixed(*pair, kernel_blocks=size) for pair, size in zip(pairs, sizes)]
    for job, result in zip(jobs, machines["rocm"].run(*jobs)):
        assert result.tokens == case.expected, (job.kernel_blocks, result.error)


def test_without_alignment_the_pairs_fail(machines, case):
    """What alignment is for. Without it the start is refused, since views collide; without that
    check too the text is garbage. If this came out right, the tests above would prove nothing."""
    refused = machines["rocm"].run(*(case.mixed(*pair, align=False) for pair in K_FIRST_PAIRS))
    assert all("self_attn" in r.error and "encoder_attn" in r.error for r in refused)
    unchecked = [case.mixed(*pair, align=False, check=False) for pair in K_FIRST_PAIRS]
    for pair, result in zip(K_FIRST_PAIRS, machines["rocm"].run(*unchecked)):
        assert result.tokens and result.tokens != case.expected, pair

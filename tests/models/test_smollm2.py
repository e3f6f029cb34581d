# SPDX-License-Identifier: Apache-2.0
"""The real model against Transformers in float32, token for token, however the work is cut up."""

import pytest
import torch
from tests.models.smollm2 import NUM_NEW_TOKENS, TOKENS_PER_PAGE, model_path

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def make_llm(**options) -> LLM:
    return LLM(model=model_path(), dtype="float32", max_model_len=512, **options)


def generate(llm: LLM, prompts: list[list[int]]):
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(inputs, GREEDY, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_one_by_one(prompts, expected):
    """Half of the prompts; the others run in company below. Guards against wrong weights, positions,
    attention or norms."""
    llm = make_llm()
    assert [tokens(generate(llm, [prompt]))[0] for prompt in prompts[::2]] == expected[::2]


def test_all_at_once_chunked_and_cached(prompts, expected):
    """Prompts are cut into chunks of at most 64 tokens beside running requests; the second run finds
    the first one's pages, whole prompts of one and two pages among them. Guards against a chunk's
    first token attending to the wrong ones, and against reusing a page that is not full."""
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=50)
    first = generate(llm, prompts)
    assert tokens(first) == expected
    second = generate(llm, prompts)
    assert tokens(second) == expected
    for prompt, output in zip(prompts, second):
        reusable = (len(prompt) - 1) // TOKENS_PER_PAGE * TOKENS_PER_PAGE
        assert output.num_cached_tokens == reusable


def test_preempted(prompts, expected):
    """A pool of 30 pages, where one request takes up to 23. Guards against a request that comes
    back with another's pages, or samples again what it had."""
    llm = make_llm(num_gpu_blocks_override=31, max_num_seqs=50, disable_log_stats=False)
    assert tokens(generate(llm, prompts)) == expected
    preemptions = next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preemptions.value > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_bytes_change_no_bit(prompts, dtype, poison):
    """The whole pool is poisoned before the requests. Guards against reading beyond a request's
    length: 0 x NaN is NaN. Logprobs are compared as bits, since tokens alone would hide it."""
    few = [prompts[i] for i in (0, 1, 2, 3, 10, 30, 45)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=5)
    inputs = [{"prompt_token_ids": ids} for ids in few]

    def run(fill: float | None):
        llm = LLM(
            model=model_path(), dtype=dtype, max_model_len=512, max_num_batched_tokens=64,
            max_num_seqs=8, kv_cache_memory_bytes=64 << 20,
        )  # fmt: skip
        if fill is not None:
            llm.collective_rpc(fill_kv_caches, args=(fill,))
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [
            [{token: lp.logprob for token, lp in position.items()} for position in o.outputs[0].logprobs]
            for o in outputs
        ]

    assert run(poison) == run(None)


def fill_kv_caches(worker, value: float) -> None:
    """Runs in the worker."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(value)
        assert not torch.isfinite(cache).any()

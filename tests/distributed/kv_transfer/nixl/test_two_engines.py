# SPDX-License-Identifier: Apache-2.0
"""Prefill on one engine and decode on another, each in a process of its own, over real NIXL: token
for token what one engine gives, for pages of every pair of sizes, cached and not, many at once; the
bytes that moved are those the pages own.
"""

from __future__ import annotations

import pytest

from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER
from tests.models.smollm2 import make_prompts, model_path
from vllm import LLM, SamplingParams

pytest.importorskip("nixl")
pytestmark = pytest.mark.slow

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
NUM_NEW_TOKENS = 12


@pytest.fixture
def llms():
    """Engines, made when asked for; shut down at the end. Metrics are those of the one made last."""
    made = {}

    def get(model: str, block_size: int, layout: str = "NHD", **options) -> LLM:
        key = model, block_size, layout
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
                patch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
                made[key] = LLM(
                    model=model, dtype="float32", block_size=block_size,
                    kv_transfer_config=dict(NIXL), disable_log_stats=False, **options,
                )  # fmt: skip
        return made[key]

    yield get
    for llm in made.values():
        llm.llm_engine.shutdown()


def greedy(num_tokens: int, kv_transfer_params=None) -> SamplingParams:
    extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    return SamplingParams(temperature=0, max_tokens=num_tokens, extra_args=extra)


def prefill(llm: LLM, prompts) -> list[dict]:
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    outputs = llm.generate(prompts, greedy(1, ask), use_tqdm=False)
    return [output.kv_transfer_params for output in outputs]


def decode(llm: LLM, prompts, params):
    return llm.generate(prompts, [greedy(NUM_NEW_TOKENS, one) for one in params], use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def read_so_far(llm: LLM) -> tuple[float, float]:
    """Requests and bytes, by the metrics."""
    found = [m for m in llm.get_metrics() if m.name == "vllm:nixl_bytes_transferred"]
    return sum(m.count for m in found), sum(m.sum for m in found)


@pytest.mark.parametrize("there", [16, 32])
@pytest.mark.parametrize("here", [16, 32])
def test_smollm2(llms, here, there):
    """32 requests at once; then again, with prompts that are in the decode engine's cache."""
    options = dict(max_model_len=512, kv_cache_memory_bytes=400 << 20, max_num_seqs=32)
    pre = llms(model_path(), there, **options)
    dec = llms(model_path(), here, "HND", **options)
    prompts = [
        {"prompt_token_ids": ids} for ids in make_prompts(dec.get_tokenizer()) if len(ids) > 1
    ][:32]
    dec.reset_prefix_cache()
    expected = tokens(dec.generate(prompts, greedy(NUM_NEW_TOKENS), use_tqdm=False))
    dec.reset_prefix_cache()
    params = prefill(pre, prompts)
    count, nbytes = read_so_far(dec)
    outputs = decode(dec, prompts, params)
    assert tokens(outputs) == expected
    count, nbytes = read_so_far(dec)[0] - count, read_so_far(dec)[1] - nbytes
    assert count == 32
    token_bytes, unit = 30 * 2 * 3 * 64 * 4, min(here, there)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    assert nbytes <= sum(-(-n // unit) * unit for n in lengths) * token_bytes
    assert nbytes >= sum(n for n in lengths if n < 16) * token_bytes
    assert tokens(decode(dec, prompts, prefill(pre, prompts))) == expected
    for llm in (pre, dec):
        llm.generate(prompts[:1], greedy(1), use_tqdm=False)
        llm.llm_engine.engine_core.call_utility("check_integrity")


@pytest.mark.parametrize("here, there", [(16, 16), (16, 32), (32, 16)])
def test_trained_bart(llms, here, there):
    """Both groups travel: self-attention over the decoder's prompt, cross-attention over the text.
    Guards against an encoder that runs again, and cross-attention pages of somebody else."""
    options = dict(kv_cache_memory_bytes=32 << 20)
    pre, dec = llms(str(FOLDER), there, **options), llms(str(FOLDER), here, "HND", **options)
    prompts = [text for text, _ in examples(32, 2, held_out=True)]
    expected = tokens(dec.generate(prompts, greedy(NUM_NEW_TOKENS), use_tqdm=False))
    dec.reset_prefix_cache()
    count, _ = read_so_far(dec)
    outputs = decode(dec, prompts, prefill(pre, prompts))
    assert tokens(outputs) == expected
    assert read_so_far(dec)[0] > count

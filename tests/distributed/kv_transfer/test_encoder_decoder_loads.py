# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder model over files, with all that may happen to a request at the same time."""

from __future__ import annotations

import pytest
from tests.models.tiny_encoder_decoder import (
    START,
    enc_dec_prompts,
    generate,
    make_bart,
    make_llm,
    random_ids,
)

from vllm import SamplingParams

pytestmark = pytest.mark.slow

NUM_NEW_TOKENS = 30
TEXTS = random_ids(20, 33, 17, 40)
BEGINNINGS = random_ids(40, 50, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder; texts and prompts, of which some begin alike; what Transformers makes of them."""
    folder = make_bart(tmp_path_factory.mktemp("bart"), max_position_embeddings=128)
    texts, prompts = [], []
    for i in range(16):
        texts.append(TEXTS[i % 4])
        own = random_ids(1 + 3 * (i % 5), seed=i)[0]
        prompts.append([START, *BEGINNINGS[i // 8][: 20 + 2 * (i % 8)], *own])
    return folder, texts, prompts, generate(folder, texts, prompts, NUM_NEW_TOKENS)


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_everything_at_once(model, tmp_path, load_async):
    """A pool for a few of the requests, prompts in chunks, inputs and beginnings in common, pages
    stored and loaded, twice. Guards against a request that is preempted, or finds another's pages,
    while keys and values of its encoder's input or prompt are on their way."""
    folder, texts, prompts, expected = model
    transfer = dict(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(shared_storage_path=str(tmp_path), load_async=load_async),
    )  # fmt: skip
    llm = make_llm(
        folder, max_model_len=96, num_gpu_blocks_override=26, max_num_batched_tokens=24,
        max_num_seqs=8, kv_transfer_config=transfer, disable_log_stats=False,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    for _ in range(2):
        outputs = llm.generate(enc_dec_prompts(texts, prompts), params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        llm.llm_engine.engine_core.call_utility("check_integrity")
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert counters["vllm:num_preemptions"] > 0
    assert any(output.num_cached_tokens for output in outputs)

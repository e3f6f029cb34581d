# SPDX-License-Identifier: Apache-2.0
"""A request that cannot go on ends by itself."""

from __future__ import annotations

from tests.models.tiny import NATIVE, generate, make_model
from vllm import LLM, SamplingParams


def test_every_token_is_forbidden(tmp_path):
    """From the second token on there is none that they may take, greedy or not: they end with an
    error then, and the request beside them goes on as Transformers does. Guards against a forbidden
    token in the answer."""
    reference = make_model(NATIVE["llama"], tmp_path)
    llm = LLM(
        model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=128,
        kv_cache_memory_bytes=4 << 20,
    )  # fmt: skip
    prompt = list(range(3, 30))
    (expected,) = generate(reference, [prompt])
    params = [SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)]
    for temperature in (0.0, 0.8):
        params.append(
            SamplingParams(temperature=temperature, max_tokens=8, allowed_token_ids=[40])
        )
        params[-1].bad_words_token_ids = [[40, 40]]
    prompts = [{"prompt_token_ids": prompt}] * 3
    fine, *failed = llm.generate(prompts, params, use_tqdm=False)
    assert list(fine.outputs[0].token_ids) == expected
    for output in failed:
        assert output.outputs[0].finish_reason == "error"
        assert list(output.outputs[0].token_ids) == [40]

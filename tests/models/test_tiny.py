# SPDX-License-Identifier: Apache-2.0
"""Every architecture against Transformers in float32, token for token, however the work is cut up.

The models are tiny and random: a wrong window, norm, scale, position or weight changes their tokens
at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tiny import (
    NATIVE,
    NUM_NEW_TOKENS,
    Family,
    generate,
    make_model,
    make_prompts,
)

from vllm import LLM, SamplingParams
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_groups import get_kv_cache_groups

# One of each kind that the others are made of; the rest runs with the slow tests.
SMOKE = ("llama", "gemma3", "gpt2")


def cases(families: dict[str, Family]) -> list:
    return [
        pytest.param(family, id=name, marks=() if name in SMOKE else pytest.mark.slow)
        for name, family in families.items()
    ]


def make_llm(folder: Path, **options) -> LLM:
    defaults = dict(max_model_len=256, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20)
    return LLM(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, **{**defaults, **options}
    )


def run(llm: LLM, prompts, num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(family: Family, folder: Path, **options) -> None:
    """Alone, then together with prompts cut into chunks, then again with their pages cached, then
    in a pool so small that requests are preempted."""
    prompts = make_prompts()
    expected = generate(make_model(family, folder), prompts)
    assert all(len(set(tokens)) > 1 for tokens in expected), "the model says one thing only"
    llm = make_llm(folder, **options)
    assert [run(llm, [prompt])[0] for prompt in prompts] == expected
    llm.reset_prefix_cache()
    assert run(llm, prompts) == expected
    assert run(llm, prompts) == expected
    options.update(max_model_len=64, num_gpu_blocks_override=small_pool(llm))
    small = make_llm(folder, disable_log_stats=False, **options)
    before = num_preemptions(small)
    assert run(small, prompts) == expected
    assert num_preemptions(small) > before


def num_preemptions(llm: LLM) -> int:
    """Of all engines of this process so far."""
    return next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def small_pool(llm: LLM) -> int:
    """Pages that hold the longest request (60 tokens) in each group of layers, and little more."""
    config = llm.llm_engine.vllm_config
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    return 1 + 5 * len(get_kv_cache_groups(config, specs))


@pytest.mark.parametrize("family", cases(NATIVE))
def test_native(family, tmp_path):
    """Guards against a model that was written wrongly here."""
    check(family, tmp_path)

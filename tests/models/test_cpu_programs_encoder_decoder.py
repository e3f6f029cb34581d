# SPDX-License-Identifier: Apache-2.0
"""Decoders that attend to an encoder's output as programs of kernels, in the engine: the tokens and
logprobs of the unrecorded path, bit for bit, while encoder inputs of all lengths come and go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.model_executor.models.test_bart import make
from tests.models.test_cpu_programs import count_replays, needs_packing, params, runner_of

from vllm import LLM

VOCAB_SIZE = 160
# Sizes that weights can be packed for, so that every product is a kernel's.
SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    d_model=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=320,
)
MODELS = {
    "bart": dict(model_type="bart"),
    "bart-tanh": dict(model_type="bart", activation_function="gelu_new", scale_embedding=True),
    "mbart": dict(model_type="mbart", tie_word_embeddings=False),
}
# One passes the 256 keys of which an attention's parts are made, others meet pages' borders.
ENCODER_LENGTHS = (300, 1, 16, 17, 130)
PROMPT_LENGTHS = (2, 40, 1, 100, 3)


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make_model(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make(folder, **{**SHAPE, **MODELS[name]})
        return folder

    return make_model


def make_llm(folder: Path, **options) -> LLM:
    """Three requests at once: the others are encoded while those decode."""
    defaults = dict(
        dtype="bfloat16",
        max_model_len=160,
        max_num_batched_tokens=80,
        max_num_seqs=3,
        kv_cache_memory_bytes=8 << 20,
        generation_config="vllm",
    )
    return LLM(model=str(folder), skip_tokenizer_init=True, **{**defaults, **options})


def prompts() -> list[dict]:
    rng = random.Random(3)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    return [
        {
            "encoder_prompt": {"prompt_token_ids": [], "multi_modal_data": {"text": ids(encoder)}},
            "decoder_prompt": {"prompt_token_ids": ids(decoder)},
        }
        for encoder, decoder in zip(ENCODER_LENGTHS, PROMPT_LENGTHS, strict=True)
    ]


def results(outputs: list) -> list:
    """Tokens, and logprobs where they were asked for."""
    outs = [output.outputs[0] for output in outputs]
    return [
        (
            list(out.token_ids),
            [sorted((t, one.logprob) for t, one in step.items()) for step in out.logprobs or ()],
        )
        for out in outs
    ]


def run(llm: LLM) -> list:
    """All together, then the last alone, then all again with what is cached."""
    inputs = prompts()
    outputs = llm.generate(inputs, params(), use_tqdm=False)
    outputs += llm.generate(inputs[-1:], params()[2:3], use_tqdm=False)
    outputs += llm.generate(inputs, params(), use_tqdm=False)
    return results(outputs)


@needs_packing
@pytest.mark.parametrize("name", MODELS)
def test_programs_change_nothing(name, folder, monkeypatch):
    """Fault: a recording keeps the encoder's length or pages of the step it was made in, or a step
    that encodes is replayed, so that its keys are never written."""
    path = folder(name)
    expected = run(make_llm(path, enforce_eager=True))
    llm = make_llm(path)
    replays = count_replays(llm, monkeypatch)
    assert run(llm) == expected
    assert {1, 2, 3} <= {reqs for reqs, tokens in replays if reqs == tokens}
    assert any(tokens > reqs for reqs, tokens in replays)  # the rest of a prompt
    assert runner_of(llm).graphs._logits is not None  # with a bias
    assert len({tuple(tokens) for tokens, _ in expected}) > 4, "would prove nothing"


def test_float32_runs_without(folder, caplog_vllm):
    """Products in float32 are torch's, and cross-attention is no reason any more."""
    llm = make_llm(folder("bart"), dtype="float32")
    assert "torch computes" in caplog_vllm.text and "CrossAttention" not in caplog_vllm.text
    assert runner_of(llm).graphs.max_num_tokens == 0
    assert len(run(llm)) == 11

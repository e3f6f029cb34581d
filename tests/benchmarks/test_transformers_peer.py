# SPDX-License-Identifier: Apache-2.0
"""The peer does the work that it is timed for: exact lengths, greedy, padding without effect."""

from __future__ import annotations

import pytest

from vllm.benchmarks.transformers_peer import TransformersSpec, left_padded
from vllm.benchmarks.workload import Workload

pytestmark = pytest.mark.slow  # imports transformers' models: seconds

MIXED = Workload(((5, 6, 7, 8, 9), (10,), (11, 12)), output_len=6)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """A small Llama with random weights. Its end-of-sequence id is one it would generate soon."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=list(range(1, 32)),
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_exact_length_and_padding(model_path, cache):
    """Guards against rows that end early and against padding that leaks into shorter prompts."""
    engine = TransformersSpec(model_path, "float32", cache).build()
    together = engine.run(MIXED).token_ids
    assert [len(ids) for ids in together] == [6, 6, 6]
    assert any(token < 32 for ids in together for token in ids[:-1]), (
        "nothing could have ended early"
    )
    alone = [engine.run(Workload((prompt,), 6)).token_ids[0] for prompt in MIXED.prompts]
    assert list(together) == alone


def test_prepare_measures_the_choices(model_path, monkeypatch):
    """With no cache asked for, the one that took least is used; one that fails is left out."""
    engine = TransformersSpec(model_path, "float32").build()
    tried = {"dynamic": 2.0, "static": 1.0, "compiled": float("inf")}
    monkeypatch.setattr(engine, "_try", lambda cache, workload: tried[cache])
    engine.prepare(MIXED)
    assert "static cache" in engine.info().settings
    tried.update(static=3.0)
    engine.prepare(MIXED)
    assert "growing cache" in engine.info().settings
    tried.update(dict.fromkeys(tried, float("inf")))
    with pytest.raises(RuntimeError, match="every cache"):
        engine.prepare(MIXED)


def test_left_padding():
    ids, mask = left_padded(((1, 2, 3), (4,)))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_encoder_decoder_model(tmp_path):
    """The peer makes as many decoding steps as ours: start token and forced BOS are given, and
    neither an early nor a forced end cuts a row. Texts of mixed length are padded without effect."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

    torch.manual_seed(0)
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    config = BartConfig(vocab_size=64, d_model=32, init_std=0.5, **sizes, **heads)
    model = BartForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=2,
        forced_bos_token_id=0,
        forced_eos_token_id=2,
        eos_token_id=list(range(32)),
        num_beams=4,
    )
    model.save_pretrained(tmp_path)
    spec = TransformersSpec(str(tmp_path), "float32", "dynamic", is_encoder_decoder=True)
    engine = spec.build()
    together = engine.run(MIXED).token_ids
    assert [len(ids) for ids in together] == [6, 6, 6]
    alone = [engine.run(Workload((prompt,), 6)).token_ids[0] for prompt in MIXED.prompts]
    assert list(together) == alone
    (tmp_path / "model.safetensors").unlink()
    random = TransformersSpec(
        str(tmp_path), "float32", "dynamic", is_encoder_decoder=True, has_random_weights=True
    )
    assert [len(ids) for ids in random.build().run(MIXED).token_ids] == [6, 6, 6]

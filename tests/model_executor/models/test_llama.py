# SPDX-License-Identifier: Apache-2.0
"""Llama against Transformers: the same weights give the same logits in every variant."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 16},
    "padded_vocabulary": {"vocab_size": 128},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "gelu": {"hidden_act": "gelu"},
    "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "eps": {"rms_norm_eps": 1e-2},
}


def logits(model, ids):
    with torch.inference_mode():
        return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name, tiny_llama, load, plain_attention):
    """Guards against a swapped shard, a lost bias, another rope or an untied head."""
    path, theirs = tiny_llama(**VARIANTS[name])
    ours = load(path)
    ids = torch.randint(0, theirs.config.vocab_size, (90,), generator=torch.manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    actual = logits(ours, ids)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sliding_window", [None, 16])
def test_mistral_is_llama_with_a_window(tmp_path, load, plain_attention, sliding_window):
    """Mistral has Llama's weights; its window must reach the attention layers."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=sliding_window,
        initializer_range=0.3,
    )
    theirs = MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (60,), generator=torch.manual_seed(1))
    with torch.inference_mode():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(logits(load(tmp_path), ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once(dtype, tiny_llama, load, plain_attention):
    """A model in a narrower dtype holds the checkpoint's values rounded to it, and runs."""
    path, theirs = tiny_llama()
    ours = load(path, dtype)
    torch_dtype = getattr(torch, dtype)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch_dtype}
    down = theirs.model.layers[1].mlp.down_proj.weight
    assert torch.equal(ours.model.layers[1].mlp.down_proj.weight, down.to(torch_dtype))
    assert logits(ours, torch.arange(20)).isfinite().all()


def test_tied_head_is_the_embedding(tiny_llama, load, plain_attention):
    """A tied head must share memory, and a checkpoint's own copy of it must not be refused."""
    path, theirs = tiny_llama(tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    save_file(weights, path / "model.safetensors")
    ours = load(path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(ours.named_parameters())


def test_checkpoints_that_fuse_projections(tiny_llama, load, plain_attention):
    """A checkpoint with qkv_proj and gate_up_proj gives the same model as one with their parts."""
    path, _ = tiny_llama()
    ids = torch.arange(30)
    expected = logits(load(path), ids)
    weights = load_file(path / "model.safetensors")
    for layer in range(3):
        for fused, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            name = f"model.layers.{layer}.{{}}.weight"
            weights[name.format(fused)] = torch.cat([weights.pop(name.format(p)) for p in parts])
    save_file(weights, path / "model.safetensors")
    assert torch.equal(logits(load(path), ids), expected)


def test_input_embeddings_replace_ids(tiny_llama, load, plain_attention):
    """`inputs_embeds` is what the ids would have become."""
    path, _ = tiny_llama()
    ours = load(path)
    ids = torch.arange(20)
    with torch.inference_mode():
        by_ids = ours(ids, torch.arange(20))
        by_embeds = ours(None, torch.arange(20), inputs_embeds=ours.embed_input_ids(ids))
    assert torch.equal(by_ids, by_embeds)


def test_attention_layers_enter_the_registry(tiny_llama):
    """The runner finds layers by name: one for each layer, in order, with the config's shapes."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.llama import LlamaForCausalLM

    path, _ = tiny_llama()
    config = VllmConfig(model_config=ModelConfig(model=str(path), dtype="float32"))
    with set_current_vllm_config(config):
        LlamaForCausalLM(vllm_config=config)
    layers = config.compilation_config.static_forward_context
    assert list(layers) == [f"model.layers.{index}.self_attn.attn" for index in range(3)]
    layer = layers["model.layers.0.self_attn.attn"]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (6, 2, 8)


def test_unsupported_rope_is_refused(tiny_llama, load, plain_attention):
    """A scaling that is not written must stop the start, not give garbage."""
    path, _ = tiny_llama()
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="longrope"):
        load(path)

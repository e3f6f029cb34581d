# SPDX-License-Identifier: Apache-2.0
"""Loaders: what is missing or too much is named; shards, random weights, GGUF by format."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import (
    BaseModelLoader,
    get_model,
    get_model_loader,
    register_model_loader,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 70,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def checkpoint() -> dict[str, torch.Tensor]:
    """Random weights of a model of CONFIG by Hugging Face's names."""
    generator = torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(70, 16), "lm_head.weight": random(70, 16)}
    weights["model.norm.weight"] = random(16)
    for layer in range(2):
        sizes = {
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
        }
        for name, shape in sizes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
    return weights


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(checkpoint(), tmp_path / "model.safetensors")
    return tmp_path


def load(path, load_format="auto", **model):
    config = VllmConfig(model_config=ModelConfig(model=str(path), dtype="float32", **model))
    config.load_config.load_format = load_format
    config.load_config.use_tqdm_on_load = False
    return get_model(vllm_config=config)


def test_all_weights_arrive(folder):
    """Every value is in its place: fused weights hold their parts one below the other."""
    model, given = load(folder), checkpoint()
    layer, prefix = model.model.layers[1], "model.layers.1."
    qkv = [given[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(qkv))
    gate_up = [given[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
    assert torch.equal(model.lm_head.weight[:70], given["lm_head.weight"])
    assert (model.lm_head.weight[70:] == 0).all()  # the vocabulary's padding
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("model.norm.weight", r"lacks 1 weights of LlamaForCausalLM: model\.norm\.weight"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            r"layers\.1\.self_attn\.qkv_proj\.weight \(shard k\)",
        ),
        ("model.layers.0.mlp.up_proj.weight", r"layers\.0\.mlp\.gate_up_proj\.weight \(shard 1\)"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_missing_weights_are_named(folder, gone, says):
    """A model with a weight left uninitialised answers nonsense: it must not start."""
    weights = checkpoint()
    del weights[gone]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.layers.0.self_attn.q_norm.weight", (8,), "q_norm"),
        ("model.layers.2.input_layernorm.weight", (16,), "layers.2"),
        ("score.weight", (1, 16), "score"),
        ("model.layers.0.self_attn.q_proj.weight", (17, 16), "q_proj.*17, 16"),
        ("model.layers.0.self_attn.k_proj.weight", (4, 16), "k_proj.*4, 16"),
        ("model.layers.0.mlp.down_proj.weight", (16, 25), "down_proj.*16, 25"),
        ("model.embed_tokens.weight", (71, 16), "71 rows"),
    ],
)
def test_unexpected_weights_and_shapes_are_named(folder, name, shape, says):
    """A checkpoint of another model must be refused with the weight's name."""
    save_file({**checkpoint(), name: torch.zeros(shape)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_shards_by_index(folder):
    """Only the files that the index lists are read, and one that is not there is named."""
    weights = list(checkpoint().items())
    parts = {"a.safetensors": dict(weights[:7]), "b.safetensors": dict(weights[7:])}
    for name, part in parts.items():
        save_file(part, folder / name)
    (folder / "model.safetensors").write_bytes(b"an old copy, not to be read")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load(folder).model.norm.weight, checkpoint()["model.norm.weight"])
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="not a valid index"):
        load(folder)


def test_damaged_and_pickled_files(folder):
    """Neither may be loaded: the first cannot, the second could run code."""
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(20))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a valid safetensors file"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no .*safetensors"):
        load(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights only"):
        load(folder)


def test_random_weights_depend_on_name_and_seed_alone(folder):
    """`--load-format dummy` needs no weights and gives the same model on every start."""
    (folder / "model.safetensors").unlink()
    first, second, other = (load(folder, "dummy", seed=seed) for seed in (3, 3, 4))
    names = dict(first.named_parameters())
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, names[name])
        assert parameter.abs().max() <= 1e-3 and parameter.float().std() > 0
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(
        first.model.layers[0].mlp.down_proj.weight, first.model.layers[1].mlp.down_proj.weight
    )


def test_load_formats(folder):
    """Each format has its loader; one that does not fit the model, or is not known, is refused."""
    with pytest.raises(ValueError, match="needs a .gguf file"):
        load(folder, "gguf")
    with pytest.raises(ValueError, match="supported: auto, safetensors, gguf, dummy"):
        get_model_loader(LoadConfig(load_format="npcache"))
    with pytest.raises(ValueError, match="no options"):
        get_model_loader(LoadConfig(model_loader_extra_config={"threads": 2}))


def test_out_of_tree_loader(monkeypatch):
    """A plugin's format is served by its class."""
    monkeypatch.setattr("vllm.model_executor.model_loader._LOADERS", {})

    @register_model_loader("mine")
    class Mine(BaseModelLoader):
        def download_model(self, model_config): ...

        def load_weights(self, model, model_config): ...

    assert isinstance(get_model_loader(LoadConfig(load_format="mine")), Mine)
    with pytest.raises(ValueError, match="subclass"):
        register_model_loader("other")(object)


def test_default_weight_loader():
    """Shapes must agree, except that a scalar may have a dimension or not."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    default_weight_loader(parameter, torch.tensor(2.0))
    assert parameter.item() == 2
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        default_weight_loader(torch.nn.Parameter(torch.zeros(3)), torch.zeros(2))

# SPDX-License-Identifier: Apache-2.0
"""Loading through Transformers' code, models from elsewhere, and models' config hooks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_tiny import make_llm, run
from tests.models.tiny import FALLBACK, NATIVE, generate, make_model, make_prompts

from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.llama import LlamaForCausalLM


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpt_neox.layers.1.mlp.dense_h_to_4h.bias": None}, "lacks weights: gpt_neox.layers.1"),
        ({"gpt_neox.extra.weight": (3,)}, "no place: gpt_neox.extra.weight"),
        ({"gpt_neox.final_layer_norm.bias": (3,)}, "another shape: gpt_neox.final_layer_norm.bias"),
    ],
)
def test_fallback_names_weights(changes, reason, tmp_path):
    """A model with a weight left random answers nonsense: it must not start."""
    make_model(FALLBACK["gpt_neox"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, shape in changes.items():
        weights.pop(name, None)
        if shape is not None:
            weights[name] = torch.zeros(shape)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        make_llm(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mixtral"])
def test_random_weights(name, tmp_path):
    """`--load-format dummy`: the same on every start, for fused experts too."""
    make_model((NATIVE | FALLBACK)[name], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    answers = [run(make_llm(tmp_path, load_format="dummy"), make_prompts()) for _ in range(2)]
    assert answers[0] == answers[1]


def test_shards(tmp_path):
    """A checkpoint in several files, of which the fallback needs all at once."""
    model = make_model(FALLBACK["mixtral"], tmp_path)
    expected = generate(model, make_prompts())
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert run(make_llm(tmp_path), make_prompts()) == expected


def test_gpt2_without_prefix_and_with_masks(tmp_path):
    """The first published checkpoints lack `transformer.` and carry causal masks along."""
    model = make_model(NATIVE["gpt2"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 512, 512)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    assert run(make_llm(tmp_path), make_prompts()) == generate(model, make_prompts())


class OutOfTreeModel(LlamaForCausalLM):
    """A model that a plugin brings along."""


@pytest.fixture
def out_of_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("OutOfTreeForCausalLM", f"{__name__}:OutOfTreeModel")
    model = make_model(NATIVE["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(architectures=["OutOfTreeForCausalLM"], model_type="out_of_tree")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


def test_out_of_tree_model(out_of_tree, monkeypatch):
    """Its class serves it, and its hooks are called when the configs are made."""
    folder, model = out_of_tree

    class Hooks(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config) -> None:
            model_config.hf_config_dict["max_position_embeddings"] = 100

        @staticmethod
        def verify_and_update_config(vllm_config) -> None:
            vllm_config.cache_config.block_size = 32

    monkeypatch.setitem(MODELS_CONFIG_MAP, "OutOfTreeForCausalLM", Hooks)
    llm = make_llm(folder, max_model_len=None)
    config = llm.llm_engine.vllm_config
    assert config.model_config.max_model_len == 100
    assert config.cache_config.block_size == 32
    served = llm.apply_model(lambda model: type(model).__name__)
    assert served == ["OutOfTreeModel"]
    assert run(llm, make_prompts()) == generate(model, make_prompts())


def test_code_that_comes_with_the_model(tmp_path, monkeypatch):
    """With --trust-remote-code the folder's own classes run, with this engine's attention."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(str(tmp_path / "m"))
    folder = tmp_path / "model"
    model = make_model(NATIVE["llama"], folder)
    (folder / "configuration_remote.py").write_text(
        "from transformers import LlamaConfig\n"
        "class RemoteConfig(LlamaConfig):\n"
        "    model_type = 'remote_llama'\n"
    )
    (folder / "modeling_remote.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .configuration_remote import RemoteConfig\n"
        "class RemoteForCausalLM(LlamaForCausalLM):\n"
        "    config_class = RemoteConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config.update(
        architectures=["RemoteForCausalLM"],
        model_type="remote_llama",
        auto_map={
            "AutoConfig": "configuration_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    )
    (folder / "config.json").write_text(json.dumps(config))
    llm = make_llm(folder, trust_remote_code=True)
    served = llm.apply_model(lambda model: type(model.model).__name__)
    assert served == ["RemoteForCausalLM"]
    assert run(llm, make_prompts()) == generate(model, make_prompts())

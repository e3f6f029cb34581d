# SPDX-License-Identifier: Apache-2.0
"""Sizes are found under each name that a family gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm.config import ModelConfig

FAMILIES = {
    "llama": dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    ),
    "gpt2": dict(n_embd=64, n_head=4, n_layer=3),
    "bart": dict(
        d_model=64, decoder_attention_heads=4, decoder_layers=3, encoder_attention_heads=8,
        encoder_layers=2,
    ),
}  # fmt: skip
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bart": "BartForConditionalGeneration",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes(tmp_path: Path, name: str):
    """Guards against a KeyError in whatever asks for a size, such as a KV connector's handshake."""
    config = {
        "model_type": name, "architectures": [ARCHITECTURES[name]], "vocab_size": 9,
        "max_position_embeddings": 32, "is_encoder_decoder": name == "bart", **FAMILIES[name],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = ModelConfig(model=str(tmp_path))
    assert made.get_hidden_size() == 64
    assert made.get_head_size() == 16
    assert made.get_total_num_attention_heads() == 4
    assert made.get_total_num_kv_heads() == (2 if name == "llama" else 4)
    assert made.get_total_num_hidden_layers() == 3

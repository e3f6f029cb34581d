# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse's config.json becomes what models and engine read."""

from __future__ import annotations

import json

import pytest

from vllm.config import ModelConfig
from vllm.transformers_utils.nemotron_parse import complete_config, num_encoder_tokens

# The fields of the published file that matter here, and how it is built.
PUBLISHED = {
    "architectures": ["NemotronParseForConditionalGeneration"],
    "auto_map": {"AutoConfig": "hf_nemotron_parse_config.NemotronParseConfig"},
    "model_type": "nemotron_parse",
    "image_size": [2048, 1648],
    "encoder": {"patch_size": 16, "args": {"model": "vit_huge_patch16_224"}},
    "decoder": {
        "d_model": 1024,
        "decoder_layers": 10,
        "scale_embedding": True,
        "vocab_size": 50000,
        "activation_function": "gelu",
        "encoder_ffn_dim": 4096,
        "max_sequence_length": 9000,
    },
}


def with_field(path: str, value: object) -> dict:
    config = json.loads(json.dumps(PUBLISHED))
    *parents, name = path.split(".")
    target = config
    for parent in parents:
        target = target[parent]
    target[name] = value
    return config


def test_published_sizes():
    """Guards against a size that is read from the wrong place."""
    config = complete_config(PUBLISHED)
    radio = config["radio"]
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "mlp_ratio")
    assert [radio[name] for name in sizes] == [1280, 32, 16, 4.0]
    assert radio["summary_idxs"] == [0, 1, 2] and radio["max_img_size"] == 2048
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "decoder_ffn_dim")
    assert [config[name] for name in sizes] == [1024, 10, 16, 4096]
    assert config["max_position_embeddings"] == 9000
    assert config["is_encoder_decoder"] and config["decoder_start_token_id"] == 2
    assert num_encoder_tokens(config["image_size"]) == 3201


def test_completing_twice_changes_nothing():
    """The config goes from process to process and may be read again there."""
    config = complete_config(PUBLISHED)
    assert complete_config(config) == config


def test_sizes_in_the_encoder_come_before_its_args():
    config = complete_config(with_field("encoder.num_hidden_layers", 2))
    assert config["radio"]["num_hidden_layers"] == 2
    assert config["radio"]["hidden_size"] == 1280


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("image_size", [2048, 1650], "multiples of 16"),
        ("image_size", [16, 48], "at least 64 wide"),
        ("image_size", 2048, r"\[height, width\]"),
        ("encoder.patch_size", 14, "patch_size .* is 14; supported: 16"),
        ("encoder.args", {"model": "vit_giant_patch14"}, "vit_giant_patch14.* supported: vit_tiny"),
        ("encoder.args", {}, "encoder.args.model"),
    ],
)
def test_what_does_not_fit_is_refused(path, value, message):
    """A wrong size must stop the start with its name, not a tensor's shape later."""
    with pytest.raises(ValueError, match=message):
        complete_config(with_field(path, value))


def test_model_config(tmp_path):
    """The engine's view: an encoder-decoder model with the decoder's sizes; no code of the folder
    is run, though the file names some."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = ModelConfig(model=str(tmp_path), dtype="float32", trust_remote_code=True)
    assert config.is_encoder_decoder
    assert config.get_vocab_size() == 50000
    assert config.get_hidden_size() == 1024 and config.get_head_size() == 64
    assert config.max_model_len == 9000
    assert config.hf_config.radio["hidden_size"] == 1280
    assert config.hf_text_config.decoder_layers == 10

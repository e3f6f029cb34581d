# SPDX-License-Identifier: Apache-2.0
"""Settings from outside the command line: variables, and the folder of the hub's cache."""

from __future__ import annotations

import json

import pytest

from tests.entrypoints.test_cli import vllm
from vllm import envs
from vllm.engine.arg_utils import EngineArgs


def test_unknown_variables(monkeypatch):
    """Upstream's that have no effect here, and misspelt ones."""
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "x")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert "VLLM_LOGING_LEVEL" in envs.unknown_variables()
    assert "VLLM_LOGGING_LEVEL" not in envs.unknown_variables()


def test_unknown_variables_are_warned_of():
    result = vllm("serve", "/nowhere", VLLM_NO_SUCH_THING="1")
    assert "VLLM_NO_SUCH_THING is set, but has no effect" in result.stderr


def test_download_dir(tmp_path):
    """A hub name's config is read from there, not from Hugging Face's own folder alone."""
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 77, "max_position_embeddings": 128,
    }  # fmt: skip
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "generation_config.json").write_text('{"top_k": 9}')
    made = EngineArgs(model="someone/tiny", download_dir=str(tmp_path)).create_model_config()
    assert made.get_vocab_size() == 77 and made.served_model_name == "someone/tiny"
    assert made.get_diff_sampling_param() == {"top_k": 9}
    with pytest.raises(ValueError, match="someone/tiny"):
        EngineArgs(model="someone/tiny").create_model_config()

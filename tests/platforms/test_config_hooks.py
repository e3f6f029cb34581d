# SPDX-License-Identifier: Apache-2.0
"""Hooks that the core calls while configs are made: each has its effect, in the stated order."""

from __future__ import annotations

import json

import pytest

from vllm import platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import Platform, PlatformEnum
from vllm.utils.argparse_utils import FlexibleArgumentParser

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


class RecordingPlatform(Platform):
    """An out-of-tree platform that notes what is asked of it."""

    _enum = PlatformEnum.OOT
    device_name = "abacus"
    device_type = "cpu"
    calls: list[str] = []

    @classmethod
    def pre_register_and_update(cls, parser=None) -> None:
        cls.calls.append("pre_register_and_update")
        if parser is not None:
            parser.add_argument("--abacus-beads", type=int)

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        cls.calls.append(model_arch)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        raise ValueError(f"no {quant} on an abacus")

    @classmethod
    def check_max_model_len(cls, max_model_len: int) -> int:
        return min(max_model_len, 100)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config) -> None:
        cls.calls.append("apply_config_platform_defaults")

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        cls.calls.append("check_and_update_config")
        vllm_config.parallel_config.worker_cls = "abacus.Worker"


@pytest.fixture
def platform(monkeypatch):
    monkeypatch.setattr(RecordingPlatform, "calls", [])
    monkeypatch.setattr(platforms, "current_platform", RecordingPlatform(), raising=False)
    return RecordingPlatform


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_order_and_effect(platform, model):
    """What the platform changed is what the engine gets."""
    config = EngineArgs(model=model).create_engine_config()
    assert platform.calls == [
        "pre_register_and_update",
        "LlamaForCausalLM",
        "apply_config_platform_defaults",
        "check_and_update_config",
    ]
    assert config.parallel_config.worker_cls == "abacus.Worker"
    assert config.model_config.max_model_len == 100
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is True


def test_the_user_s_choice_beats_the_hybrid_default(platform, model):
    """`support_hybrid_kv_cache` fills in what was left out, no more."""
    args = EngineArgs(model=model, disable_hybrid_kv_cache_manager=False)
    assert args.create_engine_config().scheduler_config.disable_hybrid_kv_cache_manager is False


def test_hybrid_is_on_where_supported(platform, model, monkeypatch):
    monkeypatch.setattr(platform, "support_hybrid_kv_cache", classmethod(lambda cls: True))
    config = EngineArgs(model=model).create_engine_config()
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_refusals_reach_the_user(platform, model):
    with pytest.raises(ValueError, match="no awq on an abacus"):
        EngineArgs(model=model, quantization="awq").create_engine_config()


def test_platform_adds_flags(platform):
    """Plugins bring options of their own; the parser must know them before it parses."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--abacus-beads", "7"]).abacus_beads == 7

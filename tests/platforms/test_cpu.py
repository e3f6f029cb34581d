# SPDX-License-Identifier: Apache-2.0
"""The CPU platform: dtypes, config, and options that have no effect there."""

from __future__ import annotations

import logging

import pytest
import torch

from vllm.config import CacheConfig, VllmConfig
from vllm.platforms import cpu
from vllm.platforms.cpu import CpuPlatform, cpu_flags
from vllm.platforms.interface import CpuArchEnum


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture
def warnings(monkeypatch):
    """What the CPU platform warns about, formatted."""
    seen: list[str] = []
    record = lambda message, *args: seen.append(message % args)  # noqa: E731
    monkeypatch.setattr(cpu.logger, "warning", record)
    return seen


def checked(**cache) -> VllmConfig:
    """A config after the CPU's hook, whatever platform the test runs on."""
    config = VllmConfig()
    config.cache_config = CacheConfig(**cache)
    config.parallel_config.worker_cls = "auto"
    CpuPlatform.check_and_update_config(config)
    return config


def test_fills_in_what_was_left_out():
    config = checked()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.cache_config.block_size == 16
    assert config.cache_config.kv_cache_memory_bytes is None


def test_keeps_what_was_given():
    """A plugin's worker and the user's page size must survive the platform's hook."""
    config = VllmConfig()
    config.cache_config = CacheConfig(block_size=32)
    config.parallel_config.worker_cls = "plugin.Worker"
    CpuPlatform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "plugin.Worker"
    assert config.cache_config.block_size == 32


def test_kv_cache_space(monkeypatch, warnings):
    """GiB, fractions too; the flag in bytes wins, aloud; checking a copy again warns of nothing."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    config = checked()
    assert config.cache_config.kv_cache_memory_bytes == 1 << 29
    CpuPlatform.check_and_update_config(config)
    assert warnings == []
    assert checked(kv_cache_memory_bytes=1 << 20).cache_config.kv_cache_memory_bytes == 1 << 20
    assert warnings == [
        "VLLM_CPU_KVCACHE_SPACE=0.5 has no effect beside --kv-cache-memory-bytes 1048576"
    ]


def test_kv_cache_space_zero_and_negative(monkeypatch):
    """0 leaves the choice to the engine, as upstream documents; a negative size is a mistake."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert checked().cache_config.kv_cache_memory_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "-1")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE=-1 is negative"):
        checked()


def test_options_without_effect_warn(warnings):
    """Nothing is dropped silently: a GPU's option says what to use instead."""
    checked()
    assert warnings == []
    checked(gpu_memory_utilization=0.5)
    assert len(warnings) == 1 and "--gpu-memory-utilization 0.5 has no effect" in warnings[0]
    assert "--kv-cache-memory-bytes" in warnings[0]


def test_dtype_preference(monkeypatch):
    """bfloat16 without instructions for it is many times slower than float32."""
    monkeypatch.setattr(cpu.host, "system", lambda: "Linux")
    x86 = classmethod(lambda cls: CpuArchEnum.X86)
    monkeypatch.setattr(cpu.Platform, "get_cpu_architecture", x86)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2"}))
    assert CpuPlatform().supported_dtype_names[0] == "float32"
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", "avx512bw", "avx512_bf16"}))
    assert CpuPlatform().supported_dtype_names == ["bfloat16", "float16", "float32"]
    assert CpuPlatform().supported_dtypes == [torch.bfloat16, torch.float16, torch.float32]


def test_cpu_flags(tmp_path):
    """x86 and ARM name the line differently; no file is no flags, not a crash."""
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t: x")
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_flags(x86) == {"fpu", "avx2", "avx512_bf16"}
    assert "bf16" in cpu_flags(arm)
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_log_level_of_warnings_is_shown_by_default():
    """The fixture above replaces `warning`; the level must be one that users see."""
    assert logging.WARNING >= cpu.logger.getEffectiveLevel()

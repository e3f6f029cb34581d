# SPDX-License-Identifier: Apache-2.0
"""The CUDA platform's questions to NVML and torch. Both are stand-ins here: there is no GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from vllm.config import VllmConfig
from vllm.platforms import DeviceCapability
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.xpu import XPUPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

GPUS = {0: ("GPU-aaa", "A100"), 5: ("GPU-fff", "H200")}


class Platform(CudaPlatform):
    """A class of its own for each test run: answers are cached by class."""

    @classmethod
    def _device_module(cls):
        return types.SimpleNamespace(
            get_device_name=lambda device_id: f"torch says {device_id}",
            get_device_capability=lambda device_id: (7, 5),
        )


@pytest.fixture
def nvml(monkeypatch):
    """NVML on a machine with GPU 0 (A100) and GPU 5 (H200)."""
    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: next(i for i, g in GPUS.items() if g[0] == uuid),
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetUUID=lambda handle: GPUS[handle][0].encode(),
        nvmlDeviceGetName=lambda handle: GPUS[handle][1],
        nvmlDeviceGetCudaComputeCapability=lambda handle: (8, 0) if handle == 0 else (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=1 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def platform():
    return type("Fresh", (Platform,), {})


def test_visible_devices_are_mapped(nvml, platform, monkeypatch):
    """NVML counts the machine's GPUs, torch the visible ones: device 0 would be another."""
    assert platform.get_device_name() == "A100"
    for visible in ("5,0", "GPU-fff,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert platform.get_device_name() == "H200"
        assert platform.get_device_uuid() == "GPU-fff"
        assert platform.get_device_name(1) == "A100"
    assert platform.get_device_capability() == DeviceCapability(9, 0)
    assert platform.get_device_total_memory() == 1 << 30
    with pytest.raises(IndexError, match="device 2 is not visible"):
        platform.get_device_name(2)


def test_torch_answers_where_nvml_cannot(nvml, platform):
    """A driver of another version than NVML's library: torch still knows the device."""

    def broken():
        raise OSError("driver/library version mismatch")

    nvml.nvmlInit = broken
    assert platform.get_device_name() == "torch says 0"
    assert platform.get_device_capability() == DeviceCapability(7, 5)


def test_bfloat16_needs_capability_8(nvml, platform, monkeypatch):
    """A T4 emulates bfloat16 slowly or not at all: auto must not choose it."""
    assert platform().supported_dtype_names[0] == "bfloat16"
    platform.check_if_supports_dtype(torch.bfloat16)
    old = classmethod(lambda cls, device_id=0: DeviceCapability(7, 5))
    monkeypatch.setattr(platform, "get_device_capability", old)
    assert platform().supported_dtype_names == ["float16", "float32"]
    assert platform().supported_dtypes == [torch.float16, torch.float32]
    platform.check_if_supports_dtype(torch.float16)
    with pytest.raises(ValueError, match="A100 has 7.5. Set --dtype float16"):
        platform.check_if_supports_dtype(torch.bfloat16)


@pytest.mark.parametrize("platform_cls", [CudaPlatform, XPUPlatform])
def test_gpu_worker(platform_cls):
    """The GPU platforms share a worker, which is there; a plugin's choice stays."""
    config = VllmConfig()
    config.parallel_config.worker_cls = "auto"
    config.cache_config.block_size = None
    platform_cls.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"
    assert resolve_obj_by_qualname(config.parallel_config.worker_cls).__name__ == "Worker"
    assert config.cache_config.block_size == 16
    config.parallel_config.worker_cls = "mine.Worker"
    platform_cls.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "mine.Worker"

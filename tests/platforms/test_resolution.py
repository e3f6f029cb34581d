# SPDX-License-Identifier: Apache-2.0
"""Finding the built-in platform. Vendor libraries are stand-ins: no test machine has them all."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from vllm import platforms
from vllm.platforms.torch_build import TorchBuild, parse_version_file, torch_build
from vllm.plugins import PluginError

CPU, CUDA, ROCM, XPU = (
    "vllm.platforms.cpu.CpuPlatform",
    "vllm.platforms.cuda.CudaPlatform",
    "vllm.platforms.rocm.RocmPlatform",
    "vllm.platforms.xpu.XPUPlatform",
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platforms, "_torch_sees", lambda device_type: False)


def build(monkeypatch, **toolkits: str) -> None:
    monkeypatch.setattr(platforms, "torch_build", lambda: TorchBuild("2.13.0", **toolkits))


def library(monkeypatch, name: str, **functions) -> None:
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))


def raising(*args):
    raise OSError("driver/library version mismatch")


def nvml(monkeypatch, gpus: int) -> None:
    library(
        monkeypatch,
        "pynvml",
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
    )


def resolved() -> str:
    return platforms.resolve_current_platform_cls_qualname()


def test_this_machine_without_torch():
    """In a new process, for real: resolving imports no torch, or the command line takes seconds."""
    code = (
        "import sys, vllm.platforms as p; c = p.current_platform; c.supported_dtype_names;"
        "assert isinstance(c, p.Platform); print(c.device_name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    device_name, imported_torch = done.stdout.split()
    if device_name == "cpu":
        assert imported_torch == "False"


def test_no_accelerator_is_the_cpu(monkeypatch):
    """With no option: neither the build nor the machine has anything else."""
    build(monkeypatch)
    assert resolved() == CPU


def test_nvml_finds_cuda(monkeypatch):
    build(monkeypatch, cuda="13.0")
    nvml(monkeypatch, gpus=2)
    assert resolved() == CUDA


def test_cpu_build_on_a_gpu_machine(monkeypatch):
    """NVML sees the GPU, but this torch cannot use it: CUDA would fail at the first tensor."""
    build(monkeypatch)
    nvml(monkeypatch, gpus=2)
    assert resolved() == CPU


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus(monkeypatch, hidden):
    """CUDA_VISIBLE_DEVICES= is how users ask for the CPU; NVML does not heed it."""
    build(monkeypatch, cuda="13.0")
    nvml(monkeypatch, gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert resolved() == CPU


def test_a_broken_vendor_library_is_not_a_crash(monkeypatch):
    """A driver update without a reboot breaks NVML: torch is asked, then the CPU serves."""
    build(monkeypatch, cuda="13.0")
    library(monkeypatch, "pynvml", nvmlInit=raising)
    assert resolved() == CPU
    monkeypatch.setattr(platforms, "_torch_sees", lambda device_type: device_type == "cuda")
    assert resolved() == CUDA


def test_rocm_by_amdsmi(monkeypatch):
    build(monkeypatch, hip="7.0")
    library(
        monkeypatch,
        "amdsmi",
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: [object()],
    )
    assert resolved() == ROCM
    library(monkeypatch, "amdsmi", amdsmi_init=raising)
    assert resolved() == CPU


def test_xpu_by_torch(monkeypatch):
    build(monkeypatch, xpu="20250101")
    assert resolved() == CPU
    monkeypatch.setattr(platforms, "_torch_sees", lambda device_type: device_type == "xpu")
    assert resolved() == XPU


def test_target_device_chooses(monkeypatch):
    """The CPU on a machine with GPUs, and an error instead of another device than asked for."""
    build(monkeypatch, cuda="13.0")
    nvml(monkeypatch, gpus=1)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert resolved() == CPU
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "rocm")
    with pytest.raises(PluginError, match="VLLM_TARGET_DEVICE=rocm asks for a platform"):
        resolved()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "abacus")
    with pytest.raises(PluginError, match="abacus names no platform; built in: cuda, rocm, xpu"):
        resolved()


def test_version_file_is_read_without_torch():
    """The three builds' files as torch writes them."""
    text = "from typing import Optional\n__version__ = '2.13.0+{0}'\n{1}"
    cuda = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    hip = "cuda: Optional[str] = None\nhip: Optional[str] = '7.0.1'\n"
    assert parse_version_file(text.format("cu130", cuda)) == TorchBuild("2.13.0+cu130", "13.0")
    assert parse_version_file(text.format("rocm7", hip)).hip == "7.0.1"
    assert parse_version_file("") == TorchBuild(None)


def test_version_file_agrees_with_torch():
    """The file on this machine says what torch itself says."""
    import torch

    torch_build.cache_clear()
    found = torch_build()
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)

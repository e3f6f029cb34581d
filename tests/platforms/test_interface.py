# SPDX-License-Identifier: Apache-2.0
"""Defaults of `Platform`: what a platform author gets without writing anything."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from vllm.platforms import DeviceCapability, Platform, PlatformEnum


class HostPlatform(Platform):
    """An out-of-tree platform that sets only the attributes."""

    _enum = PlatformEnum.OOT
    device_name = "host"
    device_type = "cpu"


class Capable(HostPlatform):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)


def test_device_access_of_a_host_platform():
    """A runner that knows no device calls these on every platform: each must work by default."""
    platform = HostPlatform()
    device = platform.get_torch_device(3)
    assert device == torch.device("cpu")
    platform.set_device(device)
    platform.synchronize()
    platform.empty_cache()
    platform.import_kernels()
    free, total = platform.mem_get_info(device)
    assert 0 < free <= total == platform.get_device_total_memory()
    assert 0 < platform.get_current_memory_usage() < total
    torch.zeros(1, pin_memory=platform.is_pin_memory_available())
    with platform.inference_mode():
        assert torch.is_inference_mode_enabled()
    with platform.stream(platform.Stream()):
        platform.Event().record()


def test_seed():
    """Two workers with one seed must draw the same numbers."""
    HostPlatform.manual_seed_all(7)
    first = torch.rand(3)
    HostPlatform.manual_seed_all(7)
    assert torch.equal(first, torch.rand(3))


def test_unknown_attributes_are_attribute_errors():
    """`None` for a name that does not exist turns a typing error into a crash elsewhere."""
    with pytest.raises(AttributeError, match="has no attribute 'Strem', nor has torch.cpu"):
        HostPlatform().Strem  # noqa: B018
    assert not hasattr(HostPlatform(), "_private")
    assert not hasattr(Platform(), "device_type")  # and no endless recursion


def test_platforms_can_be_copied():
    """`__getattr__` must not answer for what copy and pickle look up."""
    assert copy.deepcopy(HostPlatform()).device_name == "host"
    assert pickle.loads(pickle.dumps(HostPlatform())).device_name == "host"


def test_kinds():
    """An out-of-tree platform is none of the built-in ones, whatever its torch device is called."""
    platform = HostPlatform()
    assert platform.is_out_of_tree()
    assert not platform.is_cpu() and not platform.is_cuda_alike() and not platform.is_unspecified()


def test_capabilities():
    """Comparing version tuples as text or as floats ranks 10.0 below 9.0."""
    assert Capable.has_device_capability(80) and Capable.has_device_capability((9, 0))
    assert not Capable.has_device_capability(100)
    assert Capable.is_device_capability(90) and not Capable.is_device_capability((9, 1))
    assert Capable.is_device_capability_family(94) and not Capable.is_device_capability_family(80)
    assert not HostPlatform.has_device_capability(0)
    assert DeviceCapability(10, 3).to_int() == 103
    assert DeviceCapability(10, 3).as_version_str() == "10.3"
    with pytest.raises(ValueError, match="12"):
        DeviceCapability(9, 12).to_int()


def test_dtype_names_follow_an_override():
    """Plugins override upstream's `supported_dtypes` only; config reads the names."""

    class OnlyHalf(HostPlatform):
        @property
        def supported_dtypes(self):
            return [torch.float16]

    assert OnlyHalf().supported_dtype_names == ["float16"]
    assert HostPlatform().supported_dtype_names == ["bfloat16", "float16", "float32"]
    assert HostPlatform().supported_dtypes == [torch.bfloat16, torch.float16, torch.float32]


def test_visible_devices(monkeypatch):
    """Device 0 of a process with CUDA_VISIBLE_DEVICES=4,6 is the machine's fifth."""
    monkeypatch.setattr(HostPlatform, "device_control_env_var", "ABACUS_VISIBLE")
    monkeypatch.delenv("ABACUS_VISIBLE", raising=False)
    assert HostPlatform.device_id_to_physical_device_id(1) == 1
    monkeypatch.setenv("ABACUS_VISIBLE", "4, 6")
    assert HostPlatform.device_id_to_physical_device_id(1) == 6
    with pytest.raises(IndexError, match="device 2 is not visible: ABACUS_VISIBLE='4, 6'"):
        HostPlatform.device_id_to_physical_device_id(2)


def test_quantization():
    """An empty list restricts nothing; a list refuses the rest by name."""
    HostPlatform.verify_quantization("gguf")

    class Picky(HostPlatform):
        supported_quantization = ["awq", "gptq"]

    with pytest.raises(ValueError, match="'gguf' is not supported on host; supported: awq, gptq"):
        Picky.verify_quantization("gguf")


def test_no_attention_backend_says_what_to_override():
    """The first thing that a new platform's author runs into."""
    with pytest.raises(NotImplementedError, match="HostPlatform .*override get_attn_backend_cls"):
        HostPlatform.get_attn_backend_cls(None, None)

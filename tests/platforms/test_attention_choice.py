# SPDX-License-Identifier: Apache-2.0
"""Which attention backend each platform picks, and what it says when it cannot."""

from __future__ import annotations

import enum

import pytest
import torch

from vllm.logger import _log_once
from vllm.platforms import DeviceCapability, attention_choice
from vllm.platforms.attention_choice import Candidate, choose_backend
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.rocm import RocmPlatform
from vllm.platforms.xpu import XPUPlatform
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class Backend(AttentionBackend):
    """A backend as far as the choice goes."""

    supported_dtypes = [torch.float32]
    supported_kv_cache_dtypes = ["auto"]
    types: tuple[str, ...] = (AttentionType.DECODER,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in cls.types


class EveryType(Backend):
    types = tuple(AttentionType)


class Named(enum.Enum):
    """Backends that later builds have; each is here, as a class of this module."""

    FLASH_ATTN = 1
    FLASHINFER = 2
    TRITON_ATTN = 3
    ROCM_ATTN = 4
    BROKEN = 5

    def get_path(self) -> str:
        return f"{__name__}.{self.name}"

    def get_class(self) -> type[AttentionBackend]:
        if self is Named.BROKEN:
            raise ImportError("No module named 'vendor_kernels'")
        return EveryType if self is Named.TRITON_ATTN else Backend

    def is_overridden(self) -> bool:
        return False


@pytest.fixture
def all_backends(monkeypatch):
    """A build with every backend, on a machine with the packages in the returned set."""
    packages = {"triton"}
    monkeypatch.setattr(attention_choice, "_member", Named.__members__.get)
    known = lambda name: name in packages or name == __name__  # noqa: E731
    monkeypatch.setattr(attention_choice, "module_exists", known)
    for platform_cls in (CudaPlatformBase, RocmPlatform):
        capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        monkeypatch.setattr(platform_cls, "get_device_capability", capability)
    return packages


def layer(**needs) -> AttentionSelectorConfig:
    defaults = dict(head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=None)
    return AttentionSelectorConfig(**(defaults | needs))


def chosen(platform_cls, selected=None, **needs) -> str:
    return platform_cls.get_attn_backend_cls(selected, layer(**needs)).rpartition(".")[2]


def test_cpu_takes_cpu_attn():
    """The real backend, imported and asked."""
    pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert CpuPlatform.get_attn_backend_cls(None, layer()) == CPU_ATTN
    assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CPU_ATTN, layer()) == CPU_ATTN


def test_cuda_prefers_installed_packages(all_backends):
    """FLASH_ATTN, then FLASHINFER where their packages are installed, else TRITON_ATTN."""
    assert chosen(CudaPlatformBase) == "TRITON_ATTN"
    all_backends.add("flashinfer")
    assert chosen(CudaPlatformBase) == "FLASHINFER"
    all_backends.add("flash_attn")
    assert chosen(CudaPlatformBase) == "FLASH_ATTN"
    assert chosen(CudaPlatformBase, Named.TRITON_ATTN) == "TRITON_ATTN"


def test_a_backend_that_cannot_serve_the_layer_is_skipped(all_backends):
    """Cross-attention on a build with flash_attn goes to the next that does it."""
    all_backends.add("flash_attn")
    assert chosen(CudaPlatformBase, attn_type=AttentionType.ENCODER_DECODER) == "TRITON_ATTN"


@pytest.mark.parametrize("use_kv_connector", [False, True])
def test_rocm_keeps_rocm_attn(all_backends, use_kv_connector):
    """Upstream 0.28 drops ROCM_ATTN beside cross-attention and KV connectors; here it stays."""
    needs = {"use_kv_connector": use_kv_connector}
    kinds = {"ROCM_ATTN": AttentionType.DECODER, "TRITON_ATTN": AttentionType.ENCODER_DECODER}
    for name, attn_type in kinds.items():
        assert chosen(RocmPlatform, attn_type=attn_type, **needs) == name


def test_the_log_says_why_cross_attention_has_another_backend(all_backends, caplog_vllm):
    """A user who sees two backends finds the reason in the log, not only with debug on."""
    _log_once.cache_clear()
    chosen(RocmPlatform, attn_type=AttentionType.ENCODER_DECODER)
    lines = [r.getMessage() for r in caplog_vllm.records if r.levelname == "INFO"]
    assert lines == [
        "attention backend ROCM_ATTN is skipped: encoder_decoder attention is not supported"
    ]


def test_xpu_takes_triton(all_backends):
    assert chosen(XPUPlatform) == "TRITON_ATTN"


def test_selected_backend_gives_way_for_cross_attention_alone(all_backends):
    """`--attention-backend ROCM_ATTN` on BART: self-attention gets it, cross-attention cannot."""
    cross = AttentionType.ENCODER_DECODER
    assert chosen(RocmPlatform, Named.ROCM_ATTN) == "ROCM_ATTN"
    assert chosen(RocmPlatform, Named.ROCM_ATTN, attn_type=cross) == "TRITON_ATTN"
    with pytest.raises(ValueError, match="ROCM_ATTN cannot be used: .*float16"):
        chosen(RocmPlatform, Named.ROCM_ATTN, attn_type=cross, dtype=torch.float16)
    with pytest.raises(ValueError, match="FLASH_ATTN cannot be used: it does not run on rocm"):
        chosen(RocmPlatform, Named.FLASH_ATTN, attn_type=cross)


def test_selected_backend_of_another_platform(all_backends):
    """One line: what was asked for, why not, what there is, which option."""
    with pytest.raises(ValueError) as refusal:
        chosen(XPUPlatform, Named.ROCM_ATTN)
    assert str(refusal.value) == (
        "attention backend ROCM_ATTN cannot be used: it does not run on xpu; supported on xpu: "
        "TRITON_ATTN (--attention-backend)"
    )


def test_no_package_no_backend(all_backends):
    """Without triton: which package is missing, not an ImportError from inside a kernel."""
    all_backends.clear()
    with pytest.raises(ValueError, match="TRITON_ATTN: package triton is not installed"):
        chosen(XPUPlatform)


def test_backend_that_this_build_lacks():
    """A platform may list what a later build brings; today's must refuse it in words."""
    with pytest.raises(ValueError, match="XYZ_ATTN: this build does not have it"):
        choose_backend("xyz", (Candidate("XYZ_ATTN"),), None, layer(), None)


def test_backend_that_cannot_be_imported(all_backends):
    """A vendor package of the wrong version: skipped with the import's own words."""
    with pytest.raises(ValueError, match="BROKEN: it cannot be imported: .*vendor_kernels"):
        choose_backend("xyz", (Candidate("BROKEN"),), None, layer(), None)
    candidates = (Candidate("BROKEN"), Candidate("TRITON_ATTN"))
    assert choose_backend("xyz", candidates, None, layer(), None).endswith("TRITON_ATTN")


def test_registered_backend_is_taken_as_it_is():
    """Its author knows the device: `--attention-backend CUSTOM` on any platform."""
    custom = AttentionBackendEnum.CUSTOM
    with pytest.raises(ValueError, match="CUSTOM cannot be used: it does not run on cpu"):
        CpuPlatform.get_attn_backend_cls(custom, layer())
    register_backend(custom, f"{__name__}.Backend")
    try:
        assert CpuPlatform.get_attn_backend_cls(custom, layer()) == f"{__name__}.Backend"
    finally:
        custom.clear_override()

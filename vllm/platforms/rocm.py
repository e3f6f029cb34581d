# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs. torch calls them `cuda`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from .attention_choice import TORCH_ATTN, Candidate, choose_backend
from .gpu_common import set_gpu_worker
from .interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)

_TRITON = Candidate("TRITON_ATTN", package="triton")
_ROCM = Candidate("ROCM_ATTN", package="triton")
_AITER = Candidate("ROCM_AITER_UNIFIED_ATTN", package="aiter")
# Decoder self-attention keeps ROCM_ATTN in encoder-decoder models and beside KV connectors too: its
# K/V-first cache is aligned with its neighbours and registered by its true byte ranges.
SELF_ATTENTION_BACKENDS = (_ROCM, _TRITON, _AITER, TORCH_ATTN)
OTHER_ATTENTION_BACKENDS = (_ROCM, _AITER, _TRITON, TORCH_ATTN)


@cache
def _gcn_arch() -> str:
    """The first device's architecture, such as `gfx942`."""
    import torch

    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


def on_gfx9() -> bool:
    """A data-centre GPU: MI200, MI300, MI350."""
    return _gcn_arch() in ("gfx90a", "gfx942", "gfx950")


def on_mi3xx() -> bool:
    """MI300 or MI350."""
    return _gcn_arch() in ("gfx942", "gfx950")


class RocmPlatform(Platform):
    """AMD GPUs."""

    _enum = PlatformEnum.ROCM
    device_name = "rocm"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        return choose_backend(
            cls.device_name,
            cls._attention_candidates(attn_selector_config.attn_type),
            selected_backend,
            attn_selector_config,
            cls.get_device_capability(),
        )

    @classmethod
    def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
        from vllm.v1.attention.backend import AttentionType

        is_decoder = attn_type == AttentionType.DECODER
        return SELF_ATTENTION_BACKENDS if is_decoder else OTHER_ATTENTION_BACKENDS

    @classmethod
    @cache
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*cls._device_module().get_device_capability(device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls._device_module().get_device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return str(cls._device_module().get_device_properties(device_id).uuid)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).total_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).multi_processor_count

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.platforms.static_graph.TorchCUDAGraph"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner reads its KV caches by layer name."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        set_gpu_worker(vllm_config)

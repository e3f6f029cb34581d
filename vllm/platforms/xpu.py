# SPDX-License-Identifier: Apache-2.0
"""Intel GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .attention_choice import TORCH_ATTN, Candidate, choose_backend
from .gpu_common import set_gpu_worker
from .interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

ATTENTION_BACKENDS = (Candidate("TRITON_ATTN", package="triton"), TORCH_ATTN)


class XPUPlatform(Platform):
    """Intel GPUs."""

    _enum = PlatformEnum.XPU
    device_name = "xpu"
    device_type = "xpu"
    dispatch_key = "XPU"
    dist_backend = "xccl"
    device_control_env_var = "ZE_AFFINITY_MASK"

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
            None,
        )

    @classmethod
    def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
        return ATTENTION_BACKENDS

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """None: Intel GPUs are not numbered that way."""
        return None

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls._device_module().get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).total_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).gpu_subslice_count

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner reads its KV caches by layer name."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        set_gpu_worker(vllm_config)

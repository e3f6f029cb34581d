# SPDX-License-Identifier: Apache-2.0
"""The rocm platform with the host as its device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.attention_choice import Candidate
from vllm.platforms.rocm import RocmPlatform
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KV_CACHE_BYTES = 64 << 20


class EmulatedRocmPlatform(RocmPlatform):
    """What asks for the device is answered for the host, or as an MI300 would."""

    _enum = PlatformEnum.OOT
    device_name = "emulated_rocm"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def _preferred_dtype_names(cls) -> list[str]:
        """In the interpreter tl.dot of bfloat16 is wrong."""
        return ["float32", "float16"]

    @classmethod
    def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
        """The host's own kernels may be asked for as well."""
        return (*super()._attention_candidates(attn_type), Candidate("CPU_ATTN"))

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        # The host's memory is not the engine's to take a share of.
        if vllm_config.cache_config.kv_cache_memory_bytes is None:
            vllm_config.cache_config.kv_cache_memory_bytes = _KV_CACHE_BYTES

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """The host has none."""
        return False

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(9, 4)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"emulated-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return Platform.mem_get_info.__func__(cls)[1]

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return os.cpu_count() or 1

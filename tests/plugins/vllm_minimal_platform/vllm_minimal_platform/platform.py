# SPDX-License-Identifier: Apache-2.0
"""The platform: which worker and which attention backend. Everything else is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MinimalPlatform(Platform):
    """Computes on the host, but is not the built-in CPU platform."""

    _enum = PlatformEnum.OOT
    device_name = "minimal"
    device_type = "cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_minimal_platform.worker.MinimalWorker"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        return "vllm_minimal_platform.attention.MinimalAttentionBackend"

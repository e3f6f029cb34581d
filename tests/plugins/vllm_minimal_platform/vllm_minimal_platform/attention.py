# SPDX-License-Identifier: Apache-2.0
"""The attention backend: a name and a cache layout of its own over the core's kernels."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@register_backend(AttentionBackendEnum.CUSTOM)
class MinimalAttentionBackend(CPUAttentionBackend):
    """The host's kernels over a cache that lies token by token (NHD) in memory."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

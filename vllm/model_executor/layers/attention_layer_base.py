# SPDX-License-Identifier: Apache-2.0
"""What the runner knows of a layer with a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
    from vllm.v1.kv_cache_interface import KVCacheSpec


class AttentionLayerBase(ABC):
    """A layer that keeps state for each token of a request."""

    impl: AttentionImpl
    kv_cache: torch.Tensor

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Takes the layer's cache, in the shape its backend declared."""
        self.kv_cache = kv_cache

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that runs this layer."""

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What the layer needs per page; None: it keeps nothing."""

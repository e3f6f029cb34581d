# SPDX-License-Identifier: Apache-2.0
"""What backends have in common that run paged kernels on K and V as views, whatever their layout."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import KeyValueViews, key_value_views
from vllm.v1.attention.ops.paged_batch import PagedBatch
from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class PagedAttentionMetadata(AttentionMetadata):
    """slot_mapping: (tokens with K and V,) int64, on the device."""

    batch: PagedBatch
    slot_mapping: torch.Tensor
    num_actual_tokens: int


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Passes the batch on as it is."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        common = common_attn_metadata
        batch = PagedBatch(
            common.query_start_loc,
            common.query_start_loc_cpu,
            common.seq_lens,
            common.block_table_tensor,
            common.max_seq_len,
            common.causal,
        )
        return PagedAttentionMetadata(batch, common.slot_mapping, common.num_actual_tokens)


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """A layer's options and its cache as views; subclasses name the kernels.

    Cross-attention writes K and V in the step that brings them (`key` is None in others).

    Raises:
        ValueError: the layer wants what the backend does not do.
    """

    backend: ClassVar[type[AttentionBackend]]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        name = self.backend.get_name()
        if not self.backend.supports_attn_type(attn_type):
            raise ValueError(f"{name} does not do {AttentionType(attn_type).value} attention")
        if kv_sharing_target_layer_name is not None:
            raise ValueError(f"{name} does not read another layer's cache")
        if sinks is not None and len(sinks) != num_heads:
            raise ValueError(f"{len(sinks)} attention sinks for {num_heads} query heads")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.sinks = sinks
        self.alibi_slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self._viewed: torch.Tensor | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if self._viewed is not kv_cache:
            roles = self.backend.get_kv_cache_roles(self.kv_cache_dtype)
            views = key_value_views(kv_cache, roles, self.head_size, self.kv_cache_dtype)
            self._take_cache(views)
            self._viewed = kv_cache
        # All of a step's K and V are written before any is read.
        slots = attn_metadata.slot_mapping
        if key is not None and value is not None and len(slots):
            self._write(key[: len(slots)], value[: len(slots)], slots)
        rows = slice(attn_metadata.num_actual_tokens)
        self._attend(query[rows], output[rows], attn_metadata.batch)
        return output

    @abstractmethod
    def _take_cache(self, views: KeyValueViews) -> None:
        """The layer's cache, before the first step."""

    @abstractmethod
    def _write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes K and V of a step into the cache."""

    @abstractmethod
    def _attend(self, query: torch.Tensor, output: torch.Tensor, batch: PagedBatch) -> None:
        """Writes `output`, of `query`'s shape."""

# SPDX-License-Identifier: Apache-2.0
"""TORCH_ATTN: paged attention in plain torch, on any device: the reference for the others, and a way
to run where no kernels do. Slow: it goes through the requests one by one.

The cache is fused, `(num_blocks, num_kv_heads, tokens_per_block, 2 * head_size)`, in memory token by
token (NHD): `(num_blocks, tokens_per_block, num_kv_heads, 2 * head_size)`.
"""

from __future__ import annotations

import torch

from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.paged import PagedAttentionImpl, PagedAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import KeyValueViews
from vllm.v1.attention.ops.paged_batch import PagedBatch
from vllm.v1.attention.ops.torch_paged_attention import paged_attention, reshape_and_cache


class TorchAttentionBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        return "TORCH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        return ("block", "head", "token", "content")

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


class TorchAttentionImpl(PagedAttentionImpl):
    """Computes a layer with `vllm.v1.attention.ops.torch_paged_attention`."""

    backend = TorchAttentionBackend

    def _take_cache(self, views: KeyValueViews) -> None:
        self._key_cache, self._value_cache = views.key, views.value

    def _write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        reshape_and_cache(key, value, self._key_cache, self._value_cache, slots)

    def _attend(self, query: torch.Tensor, output: torch.Tensor, batch: PagedBatch) -> None:
        paged_attention(
            query,
            self._key_cache,
            self._value_cache,
            output,
            batch,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            self.alibi_slopes,
            self.sinks,
        )

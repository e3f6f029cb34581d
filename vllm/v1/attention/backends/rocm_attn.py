# SPDX-License-Identifier: Apache-2.0
"""ROCM_ATTN: decoder self-attention on AMD GPUs, with TRITON_ATTN's kernels over a cache of its own.

The cache is K/V-first, `(2, num_blocks, tokens_per_block, num_kv_heads, head_size)`: all K, then all
V. Where it shares memory with caches that are laid out page by page, its strides change, not its
shape; the kernels read strides.

    | K of block 0 | K of block 1 | ... | V of block 0 | V of block 1 | ...
"""

from __future__ import annotations

from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import content_size

RocmAttentionMetadata = TritonAttentionMetadata
RocmAttentionMetadataBuilder = TritonAttentionMetadataBuilder


class RocmAttentionBackend(TritonAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "ROCM_ATTN"

    @staticmethod
    def get_impl_cls() -> type[RocmAttentionImpl]:
        return RocmAttentionImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, content_size(head_size, cache_dtype_str))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if include_num_layers_dimension:
            raise NotImplementedError("ROCM_ATTN keeps each layer's cache by itself")
        return (0, 1, 2, 3, 4)

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        return ("kv", "block", "token", "head", "content")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


class RocmAttentionImpl(TritonAttentionImpl):
    """Computes a layer with the kernels of `vllm.v1.attention.ops.triton`."""

    backend = RocmAttentionBackend

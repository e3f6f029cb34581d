# SPDX-License-Identifier: Apache-2.0
"""TRITON_ATTN: paged attention in Triton, on any device that Triton compiles for.

The cache is blocks-first, `(num_blocks, 2, tokens_per_block, num_kv_heads, head_size)`: K then V of
a block; within them token by token (NHD), or head by head (HND) with VLLM_KV_CACHE_LAYOUT=HND:

    block 0                       block 1
    | K: t0h0 t0h1 ... | V: ... | | K: ... | V: ... |

With scales for each token and head the last dimension has room for one float32 behind each row.
"""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.paged import (
    PagedAttentionImpl,
    PagedAttentionMetadata,
    PagedAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import KeyValueViews, content_size, get_kv_cache_layout
from vllm.v1.attention.ops.paged_batch import PagedBatch
from vllm.v1.attention.ops.triton import PagedKVCache, paged_attention, reshape_and_cache
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheSpec

TritonAttentionMetadata = PagedAttentionMetadata
# From here on NVIDIA's hardware has float8_e4m3fn.
_FP8_CAPABILITY = DeviceCapability(8, 9)


class TritonAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    """Decodes can be recorded: their launch follows from the number of requests and `max_seq_len`,
    and what a request's splits are from its own length, on the device."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        if isinstance(kv_cache_spec, CrossAttentionSpec):
            return AttentionCGSupport.NEVER  # keys come in steps of their own
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class TritonAttentionBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = [
        "auto",
        "float16",
        "bfloat16",
        "float32",
        "fp8",
        "fp8_e4m3",
        "fp8_per_token_head",
        "int8_per_token_head",
    ]

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return TritonAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, content_size(head_size, cache_dtype_str))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        if get_kv_cache_layout() == "HND":
            return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        return ("block", "kv", "token", "head", "content")

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool = False,
        has_sink: bool = False,
        device_capability: DeviceCapability | None = None,
        attn_type: str = AttentionType.DECODER,
        has_sliding_window: bool = False,
        use_kv_connector: bool = False,
    ) -> list[str]:
        reasons = super().validate_configuration(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            device_capability,
            attn_type,
            has_sliding_window,
            use_kv_connector,
        )
        is_fp8 = (kv_cache_dtype or "").startswith("fp8")
        if is_fp8 and device_capability is not None and device_capability < _FP8_CAPABILITY:
            reasons.append(
                f"KV cache dtype {kv_cache_dtype} needs compute capability "
                f"{_FP8_CAPABILITY.as_version_str()}, not {device_capability.as_version_str()}"
            )
        if (kv_cache_dtype or "").endswith("per_token_head") and head_size % 4:
            reasons.append(f"KV cache dtype {kv_cache_dtype} needs head sizes that are multiples of 4")
        return reasons


class TritonAttentionImpl(PagedAttentionImpl):
    """Computes a layer with the kernels of `vllm.v1.attention.ops.triton`."""

    backend = TritonAttentionBackend

    def _take_cache(self, views: KeyValueViews) -> None:
        self._cache = PagedKVCache(*views)

    def _write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        reshape_and_cache(key, value, self._cache, slots)

    def _attend(self, query: torch.Tensor, output: torch.Tensor, batch: PagedBatch) -> None:
        paged_attention(
            query,
            self._cache,
            output,
            batch,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            self.alibi_slopes,
            self.sinks,
        )

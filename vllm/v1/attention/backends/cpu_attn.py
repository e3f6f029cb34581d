# SPDX-License-Identifier: Apache-2.0
"""CPU_ATTN: paged attention on the host's cores, over pages read in place.

The cache is fused: `(num_blocks, num_kv_heads, tokens_per_block, 2 * head_size)`, K then V in the
last dimension, in memory as written (HND), so that a head's tokens of one block are one run of
bytes:

    block 0                               block 1
    | head 0: KV KV KV ... | head 1: ... | head 0: ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.cpu_ops.program import KernelProgram
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import dtype_name
from vllm.v1.attention.ops.cpu import key_value_views, paged_attention, reshape_and_cache
from vllm.v1.kv_cache_interface import KVCacheSpec


class CPUAttentionBackend(AttentionBackend):
    supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16", "float32"]

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args, **kwargs
    ) -> list[str]:
        reasons = super().validate_configuration(
            head_size, dtype, kv_cache_dtype, *args, **kwargs
        )
        # The kernels read keys and values in the dtype of the query.
        if kv_cache_dtype not in (None, "auto", dtype_name(dtype)):
            reasons.append(
                f"a KV cache of {kv_cache_dtype} beside activations of {dtype_name(dtype)} is not "
                "supported: leave --kv-cache-dtype at auto"
            )
        return reasons

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionImpl]:
        return CPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CPUAttentionMetadataBuilder

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
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        return ("block", "head", "token", "content")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@dataclass(frozen=True)
class CPUAttentionMetadata(AttentionMetadata):
    """Shapes and dtypes as in `CommonAttentionMetadata`."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    causal: bool


class CPUAttentionMetadataBuilder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        if not current_platform.support_static_graph_mode():
            return AttentionCGSupport.NEVER
        graphs = resolve_obj_by_qualname(current_platform.get_static_graph_wrapper_cls())
        if not issubclass(graphs, KernelProgram):
            return AttentionCGSupport.NEVER  # a device's graphs do not see the host's kernels
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        return CPUAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
        )


class CPUAttentionImpl(AttentionImpl[CPUAttentionMetadata]):
    """Computes a layer with the kernels of `vllm.v1.attention.ops.cpu`.

    Raises:
        ValueError: the layer wants what they do not do.
    """

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
    ) -> None:
        if not CPUAttentionBackend.supports_attn_type(attn_type):
            kind = AttentionType(attn_type).value
            raise ValueError(
                f"CPU_ATTN does not do {kind} attention; it does decoder and encoder_decoder"
            )
        if kv_sharing_target_layer_name is not None:
            raise ValueError("CPU_ATTN does not read another layer's cache")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.alibi_slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, slots = attn_metadata.num_actual_tokens, attn_metadata.slot_mapping
        key_cache, value_cache = key_value_views(kv_cache)
        # Cross-attention writes in the step that encodes; the slots are the encoder's tokens'.
        if key is not None and value is not None and len(slots):
            key, value = key[: len(slots)], value[: len(slots)]
            reshape_and_cache(key, value, key_cache, value_cache, slots)
        paged_attention(
            query[:num_tokens],
            key_cache,
            value_cache,
            output[:num_tokens],
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            self.scale,
            causal=attn_metadata.causal,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
        )
        return output

# SPDX-License-Identifier: Apache-2.0
"""Self-attention of a decoder layer over the paged KV cache."""

from __future__ import annotations

import torch
from torch import nn

from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import kv_cache_dtype_name, str_dtype_to_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)


class Attention(nn.Module, AttentionLayerBase):
    """Attention of one layer: writes this step's K and V to the cache and attends over it.

    `prefix` is the layer's name, the key of its metadata, its slots and its cache; two layers of a
    model cannot have the same. Metadata comes through the forward context, not as arguments.

    Raises:
        ValueError: the name is taken, or no backend can serve such a layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: object | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: type[AttentionBackend] | None = None,
        **extra_impl_args,
    ) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        self.layer_name = prefix
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.attn_type = attn_type
        self.sliding_window = per_layer_sliding_window
        self.dtype = str_dtype_to_torch_dtype(vllm_config.model_config.dtype)
        self.kv_cache_dtype = (cache_config or vllm_config.cache_config).cache_dtype
        self.kv_cache_torch_dtype = str_dtype_to_torch_dtype(
            kv_cache_dtype_name(self.kv_cache_dtype, self.dtype)
        )
        self.attn_backend = attn_backend or get_attn_backend(
            head_size,
            self.dtype,
            self.kv_cache_dtype,
            has_sink=extra_impl_args.get("sinks") is not None,
            attn_type=attn_type,
            num_heads=num_heads,
            has_sliding_window=self.sliding_window is not None,
        )
        self.impl = self.attn_backend.get_impl_cls()(
            num_heads,
            head_size,
            scale,
            self.num_kv_heads,
            alibi_slopes,
            self.sliding_window,
            self.kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **extra_impl_args,
        )
        self.kv_cache = torch.empty(0)
        _register(vllm_config, prefix, self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
    ) -> torch.Tensor:
        """query: (num_tokens, num_heads * head_size); key, value: (num_tokens, num_kv_heads *
        head_size), None where nothing is to be written to the cache. Returns (num_tokens,
        num_heads * head_size). In a profiling run, which has no metadata, the output is zeros."""
        context = get_forward_context()
        query = query.view(-1, self.num_heads, self.head_size)
        if context.attn_metadata is None:
            return query.new_zeros(query.shape).flatten(1)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.impl.forward(
            self,
            query,
            None if key is None else key.view(-1, self.num_kv_heads, self.head_size),
            None if value is None else value.view(-1, self.num_kv_heads, self.head_size),
            self.kv_cache,
            context.attn_metadata[self.layer_name],
            output,
        )
        return output.flatten(1)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, backend={self.attn_backend.get_name()}"
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(act_dtype)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        shape = dict(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )
        if self.sliding_window is None:
            return FullAttentionSpec(**shape)
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            return FullAttentionSpec(**shape, sliding_window=self.sliding_window)
        return SlidingWindowSpec(**shape, sliding_window=self.sliding_window)


def _register(vllm_config: VllmConfig, prefix: str, layer: AttentionLayerBase) -> None:
    layers = vllm_config.compilation_config.static_forward_context
    if prefix in layers:
        raise ValueError(f"two layers are called {prefix!r}; give each its own prefix")
    layers[prefix] = layer

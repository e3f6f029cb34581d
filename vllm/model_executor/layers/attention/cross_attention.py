# SPDX-License-Identifier: Apache-2.0
"""A decoder layer's attention over the encoder's output."""

from __future__ import annotations

from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheSpec, get_kv_quant_mode


class CrossAttention(Attention):
    """Each request's queries attend to its whole encoder output.

    `forward(query, key, value)`: key and value are those of the inputs encoded in this step, one
    after the other in the order of the batch's requests; they go into the cache before any query
    looks at it. None in a step that encodes nothing.

    Raises:
        ValueError: `attn_type` is another than ENCODER_DECODER; and as `Attention`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        cache_config: CacheConfig | None = None,
        attn_type: str | None = None,
        **kwargs,
    ) -> None:
        if attn_type not in (None, AttentionType.ENCODER_DECODER):
            raise ValueError(
                f"CrossAttention does {AttentionType.ENCODER_DECODER.value} attention, not "
                f"{AttentionType(attn_type).value}; use Attention for that"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            cache_config=cache_config,
            attn_type=AttentionType.ENCODER_DECODER,
            **kwargs,
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return CrossAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )

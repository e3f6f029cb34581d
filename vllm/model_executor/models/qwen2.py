# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama's shape with biases on query, key and value, and a window in some layers.

Paper: https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import Qwen2Config


class Qwen2Attention(LlamaAttention):
    def __init__(
        self,
        config: Qwen2Config,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, cache_config, quant_config, prefix, qkv_bias=True, o_bias=False)


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_type = Qwen2Attention


class Qwen2ForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=Qwen2DecoderLayer)

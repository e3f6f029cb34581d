# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's text model: Gemma 2 with normed queries and keys, five layers with a sliding window for
each that attends to all, and a rope of its own for each kind.

Report: https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.utils import extract_layer_index

if TYPE_CHECKING:
    from transformers import Gemma3TextConfig


class Gemma3Attention(LlamaAttention):
    """Each head of queries and keys is normed; the rope is that of the layer's kind.

    Attention scores are not capped: `attn_logit_softcapping` is null in every published config, and
    Transformers does not use it.
    """

    def __init__(
        self,
        config: Gemma3TextConfig,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        layer_type = config.layer_types[extract_layer_index(prefix)]
        super().__init__(
            config,
            cache_config,
            quant_config,
            prefix,
            scale=config.query_pre_attn_scalar**-0.5,
            rope_parameters=config.rope_parameters[layer_type],
        )
        self.q_norm = GemmaRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(self.head_dim, config.rms_norm_eps)

    def _normalise(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_heads = self.q_norm(q.reshape(-1, self.head_dim))
        k_heads = self.k_norm(k.reshape(-1, self.head_dim))
        return q_heads.view(q.shape), k_heads.view(k.shape)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    attention_type = Gemma3Attention


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=Gemma3DecoderLayer)

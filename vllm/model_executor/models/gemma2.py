# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: norms before and after each part, scaled embeddings, soft caps, every other layer with a
sliding window.

Report: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)

if TYPE_CHECKING:
    from transformers import Gemma2Config


class Gemma2Attention(LlamaAttention):
    """Scores are scaled by a number of the config, not by the head's size, and soft-capped."""

    def __init__(
        self,
        config: Gemma2Config,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            config,
            cache_config,
            quant_config,
            prefix,
            scale=config.query_pre_attn_scalar**-0.5,
            logits_soft_cap=config.attn_logit_softcapping,
        )


class Gemma2DecoderLayer(nn.Module):
    """One layer. The residual runs beside the hidden states, as in Llama."""

    attention_type: type[LlamaAttention] = Gemma2Attention

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.self_attn = self.attention_type(
            config, vllm_config.cache_config, vllm_config.quant_config, prefix=f"{prefix}.self_attn"
        )
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_activation,
            vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRMSNorm(size, eps)
        self.post_attention_layernorm = GemmaRMSNorm(size, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(size, eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return self.post_feedforward_layernorm(hidden_states), residual


class Gemma2Model(LlamaModel):
    """Embeddings come multiplied with the root of their size, rounded to the model's dtype."""

    norm_type = GemmaRMSNorm

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module]
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
        root = self.config.hidden_size**0.5
        self.embed_scale = torch.tensor(root, dtype=torch.get_default_dtype(), device="cpu").item()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids) * self.embed_scale


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Raises ValueError for a config that wants attention in both directions."""

    model_class = Gemma2Model

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = Gemma2DecoderLayer,
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        if config.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention is not supported; supported: causal attention"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

# SPDX-License-Identifier: Apache-2.0
"""Llama and models of its shape (SmolLM2, TinyLlama, Mistral, ...).

Papers: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2307.09288.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    layer_sliding_window,
    load_stacked_weights,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.config import get_rope_parameters

if TYPE_CHECKING:
    from transformers import LlamaConfig


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: QuantizationConfig | None = None,
        bias: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = get_act_and_mul_fn(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


class LlamaAttention(nn.Module):
    """Fused projections, rotary positions, attention over the cache, output projection.

    `qkv_bias`, `o_bias`: whether the projections have biases; they, `scale` and `rope_parameters`
    are the config's where left out. `logits_soft_cap`: bound of the attention scores.
    """

    def __init__(
        self,
        config: LlamaConfig,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        qkv_bias: bool | None = None,
        o_bias: bool | None = None,
        scale: float | None = None,
        rope_parameters: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        hidden_size, total_heads = config.hidden_size, config.num_attention_heads
        total_kv_heads = getattr(config, "num_key_value_heads", None) or total_heads
        head_dim = getattr(config, "head_dim", None) or hidden_size // total_heads
        bias = getattr(config, "attention_bias", False)
        self.head_dim = head_dim
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            total_heads,
            total_kv_heads,
            bias=bias if qkv_bias is None else qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.q_size = self.qkv_proj.num_heads * head_dim
        self.kv_size = self.qkv_proj.num_kv_heads * head_dim
        self.o_proj = RowParallelLinear(
            total_heads * head_dim,
            hidden_size,
            bias=bias if o_bias is None else o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=rope_parameters or get_rope_parameters(config.to_dict()),
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            head_dim,
            scale or head_dim**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            logits_soft_cap=logits_soft_cap,
            per_layer_sliding_window=layer_sliding_window(config, prefix),
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self._normalise(q, k)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    def _normalise(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys before they are turned, (num_tokens, heads * head_dim)."""
        return q, k


class LlamaDecoderLayer(nn.Module):
    """One layer. The residual runs beside the hidden states, so that adding it fuses with the
    norm."""

    attention_type: type[LlamaAttention] = LlamaAttention

    def __init__(
        self, vllm_config: VllmConfig, prefix: str = "", config: LlamaConfig | None = None
    ) -> None:
        super().__init__()
        config = config or vllm_config.model_config.hf_text_config
        self.self_attn = self.attention_type(
            config, vllm_config.cache_config, vllm_config.quant_config, prefix=f"{prefix}.self_attn"
        )
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            vllm_config.quant_config,
            bias=getattr(config, "mlp_bias", False),
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    norm_type: type[nn.Module] = RMSNorm

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = LlamaDecoderLayer,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        group = get_pp_group()
        self.config = config
        self.embed_tokens: nn.Module = PPMissingLayer()
        if group.is_first_rank or (config.tie_word_embeddings and group.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "embed_tokens"),
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: layer_type(vllm_config, prefix=prefix),
            prefix=maybe_prefix(prefix, "layers"),
        )
        self.norm: nn.Module = PPMissingLayer()
        if group.is_last_rank:
            self.norm = self.norm_type(config.hidden_size, eps=config.rms_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """(num_tokens,) ids or (num_tokens, hidden) embeddings -> (num_tokens, hidden)."""
        if intermediate_tensors is not None:
            hidden_states, residual = (
                intermediate_tensors["hidden_states"],
                intermediate_tensors["residual"],
            )
        else:
            hidden_states = (
                self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            )
            residual = None
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by Hugging Face's names. Raises ValueError for one that has no place."""
        return load_stacked_weights(self, weights)


class LlamaForCausalLM(nn.Module, SupportsPP, SupportsQuant):
    """The model with its output projection, which may be the embedding's table."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model_class: type[LlamaModel] = LlamaModel

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = LlamaDecoderLayer,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = self.model_class(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), layer_type=layer_type
        )
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = self._make_lm_head(vllm_config, maybe_prefix(prefix, "lm_head"))
            self.logits_processor = LogitsProcessor(
                config.vocab_size,
                scale=getattr(config, "logit_scale", None) or 1.0,
                soft_cap=getattr(config, "final_logit_softcapping", None),
            )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def _make_lm_head(self, vllm_config: VllmConfig, prefix: str) -> ParallelLMHead:
        # Tied, the head is made without memory of its own.
        with torch.device(
            "meta" if self.config.tie_word_embeddings else torch.get_default_device()
        ):
            lm_head = ParallelLMHead(
                self.config.vocab_size,
                self.config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=prefix,
            )
        if self.config.tie_word_embeddings:
            return lm_head.tie_weights(self.model.embed_tokens)
        return lm_head

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """(num_tokens,) ids or (num_tokens, hidden_size) embeddings -> (num_tokens,
        hidden_size)."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, hidden_size) -> (num_tokens, vocab_size)."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by Hugging Face's names; a tied head's own copy in the checkpoint is left
        out."""
        skip = ["lm_head."] if self.config.tie_word_embeddings else []
        return AutoWeightsLoader(self, skip_prefixes=skip).load_weights(weights)

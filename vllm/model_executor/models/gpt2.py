# SPDX-License-Identifier: Apache-2.0
"""GPT-2: learned positions, layer norms, biases everywhere.

Paper: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.learned_positions import LearnedPositions
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    extract_layer_index,
    make_layers,
    maybe_prefix,
)

if TYPE_CHECKING:
    from transformers import GPT2Config

# Checkpoints keep these as (in, out), the others' order transposed.
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
# Causal masks that old checkpoints carry along.
_MASKS = (".attn.bias", ".attn.masked_bias")


class GPT2Attention(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GPT2Config = vllm_config.model_config.hf_text_config
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        head_dim = hidden_size // num_heads
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= extract_layer_index(prefix) + 1
        quant_config = vllm_config.quant_config
        self.c_attn = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            bias=True,
            quant_config=quant_config,
            prefix=f"{prefix}.c_attn",
        )
        self.c_proj = RowParallelLinear(
            hidden_size, hidden_size, quant_config=quant_config, prefix=f"{prefix}.c_proj"
        )
        self.attn = Attention(
            self.c_attn.num_heads,
            head_dim,
            scale,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.c_attn(hidden_states)
        output, _ = self.c_proj(self.attn(*qkv.chunk(3, dim=-1)))
        return output


class GPT2MLP(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GPT2Config = vllm_config.model_config.hf_text_config
        inner_size = config.n_inner or 4 * config.hidden_size
        quant_config = vllm_config.quant_config
        self.c_fc = ColumnParallelLinear(
            config.hidden_size, inner_size, quant_config=quant_config, prefix=f"{prefix}.c_fc"
        )
        self.c_proj = RowParallelLinear(
            inner_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.c_proj"
        )
        self.act = get_act_fn(config.activation_function)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states, _ = self.c_fc(hidden_states)
        hidden_states, _ = self.c_proj(self.act(hidden_states))
        return hidden_states


class GPT2Block(nn.Module):
    """One layer; the residual runs beside the hidden states, so that adding it fuses with the
    norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GPT2Config = vllm_config.model_config.hf_text_config
        self.ln_1 = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(vllm_config, prefix=f"{prefix}.attn")
        self.ln_2 = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(vllm_config, prefix=f"{prefix}.mlp")

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.ln_1(hidden_states)
        else:
            hidden_states, residual = self.ln_1(hidden_states, residual)
        hidden_states, residual = self.ln_2(self.attn(hidden_states), residual)
        return self.mlp(hidden_states), residual


class GPT2Model(nn.Module):
    """Token and position embeddings, layers, final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GPT2Config = vllm_config.model_config.hf_text_config
        if config.add_cross_attention:
            raise ValueError("add_cross_attention is not supported; supported: decoder-only GPT-2")
        self.wte = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "wte"),
        )
        self.wpe = LearnedPositions(config.max_position_embeddings, config.hidden_size)
        _, _, self.h = make_layers(
            config.num_hidden_layers,
            lambda prefix: GPT2Block(vllm_config, prefix=prefix),
            prefix=maybe_prefix(prefix, "h"),
        )
        self.ln_f = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wte(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(num_tokens,) ids or (num_tokens, hidden) embeddings -> (num_tokens, hidden)."""
        embeddings = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, residual = self.wpe(embeddings, positions), None
        for layer in self.h:
            hidden_states, residual = layer(hidden_states, residual)
        hidden_states, _ = self.ln_f(hidden_states, residual)
        return hidden_states


class GPT2LMHeadModel(nn.Module):
    """The model with its output projection, which is usually the embedding's table."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: GPT2Config = vllm_config.model_config.hf_text_config
        self.config = config
        self.transformer = GPT2Model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "transformer")
        )
        # Tied, the head is made without memory of its own.
        tied = config.tie_word_embeddings
        with torch.device("meta" if tied else torch.get_default_device()):
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        if tied:
            self.lm_head = self.lm_head.tie_weights(self.transformer.wte)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        return self.transformer.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(num_tokens,) ids or (num_tokens, hidden_size) embeddings -> (num_tokens,
        hidden_size)."""
        return self.transformer(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, hidden_size) -> (num_tokens, vocab_size)."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by Hugging Face's names, with or without the leading `transformer.`."""
        skip = ["lm_head."] if self.config.tie_word_embeddings else []
        return AutoWeightsLoader(self, skip_prefixes=skip).load_weights(_in_our_order(weights))


def _in_our_order(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name.endswith(_MASKS):
            continue
        if name.endswith(_TRANSPOSED):
            tensor = tensor.t()
        yield name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}", tensor

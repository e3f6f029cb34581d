# SPDX-License-Identifier: Apache-2.0
"""mBART: BART with its norms in front of the blocks (pre-norm) and one more at the end.

Paper: https://arxiv.org/abs/2001.08210. Which language comes out, the decoder prompt's forced BOS
token says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.bart import (
    LAYER_NORM_EPS,
    BartDecoder,
    BartDecoderLayer,
    BartEncoder,
    BartEncoderLayer,
    BartForConditionalGeneration,
    BartModel,
    BartScaledWordEmbedding,
    finite_half,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.bart import Config


class MBartEncoderLayer(BartEncoderLayer):
    """Hidden states may be overwritten: sums are made in place."""

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: torch.Tensor
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states, cu_seqlens, max_seqlen)
        hidden_states, residual = self.final_layer_norm(hidden_states, residual)
        return finite_half(residual + self.feed_forward(hidden_states))


class MBartDecoderLayer(BartDecoderLayer):
    """The residual runs beside the hidden states, so that adding it fuses with the norm; None: there is
    none yet. Both may be overwritten."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.self_attn_layer_norm(hidden_states)
        else:
            hidden_states, residual = self.self_attn_layer_norm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.encoder_attn_layer_norm(hidden_states, residual)
        hidden_states = self.encoder_attn(hidden_states, encoder_hidden_states)
        hidden_states, residual = self.final_layer_norm(hidden_states, residual)
        return self.feed_forward(hidden_states), residual


class MBartEncoder(BartEncoder):
    layer_cls = MBartEncoderLayer

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        embed_tokens: BartScaledWordEmbedding,
        prefix: str = "",
    ) -> None:
        super().__init__(config, vllm_config, embed_tokens, prefix)
        self.layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(self, texts: list[torch.Tensor]) -> torch.Tensor:
        return self.layer_norm(super().forward(texts))


class MBartDecoder(BartDecoder):
    layer_cls = MBartDecoderLayer

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        embed_tokens: BartScaledWordEmbedding,
        prefix: str = "",
        has_positions: bool = True,
    ) -> None:
        super().__init__(config, vllm_config, embed_tokens, prefix, has_positions)
        self.layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def run_layers(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, encoder_hidden_states, residual)
        hidden_states, _ = self.layer_norm(hidden_states, residual)
        return hidden_states


class MBartModel(BartModel):
    encoder_cls = MBartEncoder
    decoder_cls = MBartDecoder


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """Prompts are processed as BART's."""

    model_cls = MBartModel

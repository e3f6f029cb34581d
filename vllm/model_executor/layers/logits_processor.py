# SPDX-License-Identifier: Apache-2.0
"""Hidden states to logits."""

from __future__ import annotations

import torch

from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@PluggableLayer.register("logits_processor")
class LogitsProcessor(PluggableLayer):
    """Multiplies with the output projection, cuts the vocabulary's padding off, caps and scales."""

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = org_vocab_size or vocab_size
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.soft_cap = soft_cap

    def forward(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states (num_tokens, hidden) -> (num_tokens, org_vocab_size)."""
        logits = hidden_states
        if not self.logits_as_input:
            logits = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
            if lm_head.tp_size > 1:
                logits = tensor_model_parallel_all_gather(logits)
            logits = logits[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    def extra_repr(self) -> str:
        return f"org_vocab_size={self.org_vocab_size}, scale={self.scale}, soft_cap={self.soft_cap}"

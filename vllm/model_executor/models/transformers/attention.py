# SPDX-License-Identifier: Apache-2.0
"""Attention functions under which the modules of Transformers run, and the layers behind them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers.calls import AttentionCall
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel
from vllm.model_executor.models.utils import maybe_prefix

PAGED = "vllm"
# The same attention over whole sequences without a cache, to compare with Transformers' own.
PLAIN = "vllm_plain"
_LAYER = "_vllm_attention"


class FallbackAttention(nn.Module):
    """The layer behind one module of Transformers. `sequence_lengths`: how the tokens of a run
    under `PLAIN` are made up."""

    def __init__(self, vllm_config: VllmConfig, call: AttentionCall, prefix: str) -> None:
        super().__init__()
        if call.value_head_size > call.head_size:
            raise UnsupportedModel(
                f"{call.module_name} has values of {call.value_head_size} dimensions with keys of "
                f"{call.head_size}"
            )
        self.call = call
        self.sequence_lengths: list[int] = []
        self.attn = Attention(
            call.num_heads,
            call.head_size,
            call.scale,
            num_kv_heads=call.num_kv_heads,
            cache_config=vllm_config.cache_config,
            logits_soft_cap=call.logits_soft_cap,
            per_layer_sliding_window=call.sliding_window,
            prefix=maybe_prefix(prefix, f"{call.module_name}.attn"),
        )

    def attach(self, model: PreTrainedModel) -> None:
        attach(self, model, self.call)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(1, heads, num_tokens, head_size) each -> (1, num_tokens, heads, value_head_size)."""
        call, num_tokens = self.call, query.shape[2]
        # The cache holds keys and values of one size.
        value = F.pad(value, (0, call.head_size - call.value_head_size))
        flat = (x[0].transpose(0, 1).reshape(num_tokens, -1) for x in (query, key, value))
        output = self.attn(*flat).view(1, num_tokens, call.num_heads, call.head_size)
        return output[..., : call.value_head_size]

    def plain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The same without a cache, over `sequence_lengths`."""
        parts = (x.split(self.sequence_lengths, dim=2) for x in (query, key, value))
        return torch.cat([self._plain_sequence(*part) for part in zip(*parts)], dim=1)

    def _plain_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        call, num_tokens = self.call, query.shape[2]
        group = call.num_heads // call.num_kv_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = query.float() @ key.float().transpose(2, 3) * call.scale
        if call.logits_soft_cap:
            scores = torch.tanh(scores / call.logits_soft_cap) * call.logits_soft_cap
        places = torch.arange(num_tokens, device=query.device)
        ages = places[:, None] - places
        unseen = (ages < 0) | (ages >= (call.sliding_window or num_tokens))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        return (weights @ value.float()).to(query.dtype).transpose(1, 2)


def attach(layer: nn.Module, model: PreTrainedModel, call: AttentionCall) -> None:
    """Let `layer` serve the module that made the call. (Not as its submodule: the tree stays as it
    is.)"""
    model.get_submodule(call.module_name).__dict__[_LAYER] = layer


def _paged(module, query, key, value, attention_mask, **_):
    return module.__dict__[_LAYER](query, key, value), None


def _plain(module, query, key, value, attention_mask, **_):
    return module.__dict__[_LAYER].plain(query, key, value), None


AttentionInterface.register(PAGED, _paged)
AttentionInterface.register(PLAIN, _plain)

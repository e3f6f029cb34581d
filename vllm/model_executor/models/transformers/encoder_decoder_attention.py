# SPDX-License-Identifier: Apache-2.0
"""The layers behind an encoder's attention, and a decoder's to the encoder's output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import CrossAttention, MMEncoderAttention
from vllm.model_executor.models.transformers.attention import attach
from vllm.model_executor.models.transformers.calls import AttentionCall
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel
from vllm.model_executor.models.utils import maybe_prefix


@dataclass
class Step:
    """`encodes`: the encoder's output that the decoder is called with is this step's; else it
    stands for none. The lengths say how the tokens of a run without a cache are made up."""

    encodes: bool = False
    decoder_lengths: list[int] = field(default_factory=list)
    encoder_lengths: list[int] = field(default_factory=list)


def _check_value_size(call: AttentionCall) -> None:
    if call.value_head_size != call.head_size:
        raise UnsupportedModel(
            f"{call.module_name} has values of {call.value_head_size} dimensions with keys of "
            f"{call.head_size}"
        )


class FallbackEncoderAttention(nn.Module):
    """Texts of one length, a row each, without padding."""

    def __init__(self, call: AttentionCall, prefix: str) -> None:
        super().__init__()
        _check_value_size(call)
        self.call = call
        self.attn = MMEncoderAttention(
            call.num_heads,
            call.head_size,
            call.scale,
            num_kv_heads=call.num_kv_heads,
            prefix=maybe_prefix(prefix, f"{call.module_name}.attn"),
        )

    def attach(self, model: PreTrainedModel) -> None:
        attach(self, model, self.call)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(texts, heads, num_tokens, head_size) each -> (texts, num_tokens, heads, head_size)."""
        return self.attn(*(x.transpose(1, 2) for x in (query, key, value)))

    # It has no cache.
    plain = forward


class FallbackCrossAttention(nn.Module):
    """Each request's queries to its whole encoder output. Keys and values of a step that encodes
    nothing are thrown away."""

    def __init__(
        self, vllm_config: VllmConfig, call: AttentionCall, step: Step, prefix: str
    ) -> None:
        super().__init__()
        _check_value_size(call)
        self.call = call
        self.step = step
        self.attn = CrossAttention(
            call.num_heads,
            call.head_size,
            call.scale,
            num_kv_heads=call.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, f"{call.module_name}.attn"),
        )

    def attach(self, model: PreTrainedModel) -> None:
        attach(self, model, self.call)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query (1, heads, num_tokens, head_size); key, value (1, kv_heads, num_encoder_tokens,
        head_size) -> (1, num_tokens, heads, head_size)."""
        flat = [x[0].transpose(0, 1).flatten(1) for x in (query, key, value)]
        if not self.step.encodes:
            flat[1:] = (None, None)
        return self.attn(*flat).view(1, query.shape[2], self.call.num_heads, self.call.head_size)

    def plain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The same without a cache, over the step's lengths."""
        step = self.step
        parts = zip(
            query.split(step.decoder_lengths, dim=2),
            key.split(step.encoder_lengths, dim=2),
            value.split(step.encoder_lengths, dim=2),
            strict=True,
        )
        return torch.cat([self._plain_sequence(*part) for part in parts], dim=1)

    def _plain_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        group = self.call.num_heads // self.call.num_kv_heads
        key, value = (x.repeat_interleave(group, dim=1).float() for x in (key, value))
        weights = (query.float() @ key.transpose(2, 3) * self.call.scale).softmax(dim=-1)
        return (weights @ value).to(query.dtype).transpose(1, 2)

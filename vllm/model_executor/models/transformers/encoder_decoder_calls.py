# SPDX-License-Identifier: Apache-2.0
"""What a model of Transformers with a text encoder asks of attention, found in a dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from vllm.model_executor.models.transformers.calls import (
    NUM_TOKENS,
    AttentionCall,
    Recorder,
    check_keywords,
    check_layers,
    described_mask,
    find_window,
    recording,
)
from vllm.model_executor.models.transformers.parts import EncoderDecoderParts
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel

# Another number than the decoder's, by which keys show whose they are.
_NUM_ENCODER_TOKENS = NUM_TOKENS + 1
# How a mask that hides nothing goes through the model.
_NOTHING_HIDDEN = -1


@dataclass(frozen=True)
class EncoderDecoderCalls:
    """The encoder's calls, and those of the decoder's layers to themselves and to the encoder's
    output."""

    encoder: list[AttentionCall]
    decoder: list[AttentionCall]
    cross: list[AttentionCall]


@dataclass
class _EncoderDecoderRecorder(Recorder):
    """`calls` are the decoder's to itself."""

    encoder_calls: list[AttentionCall] = field(default_factory=list)
    cross_calls: list[AttentionCall] = field(default_factory=list)

    def describe_mask(self, mask_function: Callable) -> int:
        if _hides_nothing(mask_function, self.max_model_len):
            return _NOTHING_HIDDEN
        return find_window(mask_function, self.max_model_len) or 0

    def note(self, module, query, key, value, attention_mask, scaling=None, **keywords) -> None:
        name = self.names[module]
        mask = described_mask(name, attention_mask)
        if key.shape[2] != _NUM_ENCODER_TOKENS:
            if mask == _NOTHING_HIDDEN:
                raise UnsupportedModel(f"{name} attends in both directions")
            super().note(module, query, key, value, attention_mask, scaling, **keywords)
            return
        check_keywords(name, keywords)
        if attention_mask is not None and mask != _NOTHING_HIDDEN:
            raise UnsupportedModel(f"{name} does not attend to all of the encoder's tokens")
        if keywords.get("softcap") or keywords.get("sliding_window"):
            raise UnsupportedModel(f"{name} has a soft cap or a window over the encoder's tokens")
        is_encoder = query.shape[2] == _NUM_ENCODER_TOKENS
        calls = self.encoder_calls if is_encoder else self.cross_calls
        calls.append(self.describe(name, (query, key, value), scaling, keywords, None))


def _hides_nothing(mask_function: Callable, num_tokens: int) -> bool:
    with torch.device("cpu"):
        keys, zero = torch.arange(num_tokens), torch.tensor(0)
        seen = (
            torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys))
            for query in {0, num_tokens // 2, num_tokens - 1}
        )
        return all(bool(one.all()) for one in seen)


def record_encoder_decoder_calls(
    model: PreTrainedModel, num_layers: int, max_model_len: int
) -> EncoderDecoderCalls:
    """The calls of a model on the meta device whose attention implementation is `RECORDING`.

    Args:
        num_layers: of the decoder.

    Raises:
        UnsupportedModel: naming what is in the way.
    """
    names = {module: name for name, module in model.named_modules()}
    recorder = _EncoderDecoderRecorder(names, max_model_len)
    parts = EncoderDecoderParts(model)
    with recording(recorder):
        encoder_ids = torch.zeros(1, _NUM_ENCODER_TOKENS, dtype=torch.int64)
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        encoder_output = parts.encode(encoder_ids)
        # With a mask of ones nothing is inferred from the positions' values, which are not there.
        hidden = parts.decode(ids[0], encoder_output, input_ids=ids, attention_mask=ids.bool())
        parts.project(hidden)
    check_layers(recorder.calls, num_layers)
    check_layers(recorder.cross_calls, num_layers)
    return EncoderDecoderCalls(recorder.encoder_calls, recorder.calls, recorder.cross_calls)

# SPDX-License-Identifier: Apache-2.0
"""A language model of Transformers in parts: token ids to hidden states, those to logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from vllm.model_executor.models.transformers.positions import DecoderPositions
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel


class _DecoderOutput(MoeModelOutputWithPast):
    """Hidden states and, whatever else an output projection looks for, None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands for the decoder: its output is what came in as embeddings."""

    def forward(self, *args, inputs_embeds: torch.Tensor, **kwargs) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


class ModelParts:
    """`decode`: the model's decoder; `project`: the whole model with its decoder taken out, so that
    whatever it does to logits (scales, caps) is done."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        self._decoder = decoder if isinstance(decoder, PreTrainedModel) else model.base_model
        paths = (name for name, module in model.named_modules() if module is self._decoder)
        path = next(paths, "")
        if not path:
            raise UnsupportedModel("its output projection is not apart from its decoder")
        self._head = _with_submodule(model, path, _GivenStates())

    def decode(self, **inputs: Any) -> torch.Tensor:
        """Transformers' arguments (1, num_tokens, ...) -> (1, num_tokens, hidden_size)."""
        return self._decoder(use_cache=False, **inputs).last_hidden_state

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(1, num_tokens, hidden_size) -> (1, num_tokens, vocab_size)."""
        return self._head(inputs_embeds=hidden_states, use_cache=False).logits


class _GivenDecoderStates(nn.Module):
    """Stands for encoder and decoder: the output is what came in as the decoder's embeddings."""

    def forward(self, *args, decoder_inputs_embeds: torch.Tensor, **kwargs) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=decoder_inputs_embeds)


class EncoderDecoderParts:
    """`encode` and `decode`: the model's two halves; `project`: the whole model with both taken
    out, so that whatever it does to logits (scales, biases) is done."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        self._takes_positions = "position_ids" in _parameters(self._decoder)
        self._positions = DecoderPositions(self._decoder)
        paths = (name for name, module in model.named_modules() if module is model.base_model)
        path = next(paths, "")
        if not path:
            raise UnsupportedModel("its output projection is not apart from its decoder")
        self._head = _with_submodule(model, path, _GivenDecoderStates())

    def encode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(texts, num_tokens) -> (texts, num_tokens, hidden_size)."""
        return self._encoder(input_ids=input_ids, use_cache=False).last_hidden_state

    def decode(
        self, positions: torch.Tensor, encoder_hidden_states: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """positions (num_tokens,), encoder_hidden_states (1, num_encoder_tokens, hidden_size),
        Transformers' other arguments (1, num_tokens, ...) -> (1, num_tokens, hidden_size)."""
        if self._takes_positions:
            inputs["position_ids"] = positions[None]
        inputs["encoder_hidden_states"] = encoder_hidden_states
        with self._positions.given(positions):
            return self._decoder(use_cache=False, **inputs).last_hidden_state

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(1, num_tokens, hidden_size) -> (1, num_tokens, vocab_size)."""
        return self._head(decoder_inputs_embeds=hidden_states, use_cache=False).logits


def _parameters(module: nn.Module) -> Set[str]:
    return inspect.signature(type(module).forward).parameters.keys()


def _with_submodule(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """A copy of `module` that shares everything with it but has `replacement` at `path`."""
    shallow = copy.copy(module)
    name, _, rest = path.partition(".")
    inner = _with_submodule(module._modules[name], rest, replacement) if rest else replacement
    shallow._modules = {**module._modules, name: inner}
    return shallow

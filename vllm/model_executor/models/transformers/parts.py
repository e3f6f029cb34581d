# SPDX-License-Identifier: Apache-2.0
"""A causal language model of Transformers in two: token ids to hidden states, those to logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


class UnsupportedModel(ValueError):
    """The model cannot be served with Transformers' code; the message says what is in the way."""


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


def _with_submodule(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """A copy of `module` that shares everything with it but has `replacement` at `path`."""
    shallow = copy.copy(module)
    name, _, rest = path.partition(".")
    inner = _with_submodule(module._modules[name], rest, replacement) if rest else replacement
    shallow._modules = {**module._modules, name: inner}
    return shallow

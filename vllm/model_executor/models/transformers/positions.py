# SPDX-License-Identifier: Apache-2.0
"""A decoder of Transformers that counts its tokens itself is told their positions instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm.model_executor.models.transformers.unsupported import UnsupportedModel

_NAME = "embed_positions"


class DecoderPositions:
    """Stands in front of a decoder's `embed_positions`, if it has one.

    Outside of `given` the module does as ever.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self._current: torch.Tensor | None = None
        module = dict(decoder.named_children()).get(_NAME)
        if module is None:
            return
        takes = inspect.signature(type(module).forward).parameters
        if "position_ids" in takes:
            module.forward = partial(self._with_position_ids, module)
        elif isinstance(getattr(module, "weights", None), torch.Tensor) and "input_ids" in takes:
            module.forward = partial(self._beside_padding, module)
        else:
            raise UnsupportedModel(f"its decoder's {_NAME} cannot be told positions")

    @contextmanager
    def given(self, positions: torch.Tensor) -> Iterator[None]:
        """A run over tokens at these positions (num_tokens,)."""
        self._current = positions
        try:
            yield
        finally:
            self._current = None

    def _with_position_ids(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """They take the place of those that the decoder made, in the same shape."""
        forward = type(module).forward
        if self._current is None:
            return forward(module, *args, **kwargs)
        call = inspect.signature(forward).bind(module, *args, **kwargs)
        theirs = call.arguments.get("position_ids")
        shape = self._current.shape if theirs is None else theirs.shape
        call.arguments["position_ids"] = self._current.view(shape)
        return forward(*call.args, **call.kwargs)

    def _beside_padding(
        self, module: nn.Module, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A table in which rows up to the padding token's id are no positions, and padding has that
        id's row wherever it stands."""
        if self._current is None:
            return type(module).forward(module, input_ids, *args, **kwargs)
        rows = self._current + 1
        if input_ids is not None:
            rows = rows * input_ids[0].ne(module.padding_idx)
        return module.weights[rows + module.padding_idx][None]

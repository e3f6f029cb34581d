# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a model. Models need not inherit from these: having the members is
enough."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.config import VllmConfig


@runtime_checkable
class VllmModel(Protocol):
    """Token ids and positions, flat over all requests, to hidden states."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None: ...

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        ...

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Both (num_tokens,) -> (num_tokens, hidden_size)."""
        ...


@runtime_checkable
class VllmModelForTextGeneration(VllmModel, Protocol):
    """A model whose hidden states become logits."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, hidden_size) -> (num_tokens, vocab_size)."""
        ...


def is_vllm_model(model: type[nn.Module] | nn.Module) -> bool:
    """Whether a class (or an instance of one) can be made and called as the engine does."""
    cls = model if isinstance(model, type) else type(model)
    if not callable(getattr(cls, "forward", None)) or not callable(
        getattr(cls, "embed_input_ids", None)
    ):
        return False
    parameters = inspect.signature(cls.__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or {"vllm_config", "prefix"} <= parameters.keys()


def is_text_generation_model(model: type[nn.Module] | nn.Module) -> bool:
    """Whether it is such a model and gives logits."""
    cls = model if isinstance(model, type) else type(model)
    return is_vllm_model(cls) and callable(getattr(cls, "compute_logits", None))

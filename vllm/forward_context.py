# SPDX-License-Identifier: Apache-2.0
"""What a forward pass knows besides its arguments: attention metadata and slots, a layer's by name.

One global, since one thread runs the model; setting it costs nothing a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata


@dataclass
class ForwardContext:
    """no_compile_layers: the model's attention layers by name.
    attn_metadata: a layer's metadata by name; None in a profiling run, where attention is skipped.
    slot_mapping: (num_tokens,) int64 by layer name."""

    no_compile_layers: dict[str, Any]
    attn_metadata: dict[str, AttentionMetadata] | None
    slot_mapping: dict[str, torch.Tensor]
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


_context: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the forward pass that is running.

    Raises:
        RuntimeError: none is.
    """
    if _context is None:
        raise RuntimeError("no forward pass is running: call the model inside set_forward_context")
    return _context


def is_forward_context_available() -> bool:
    """Whether a forward pass is running."""
    return _context is not None


@contextmanager
def override_forward_context(forward_context: ForwardContext | None) -> Iterator[None]:
    """Runs what is inside with `forward_context`."""
    global _context
    previous, _context = _context, forward_context
    try:
        yield
    finally:
        _context = previous


@contextmanager
def set_forward_context(
    attn_metadata: dict[str, AttentionMetadata] | None,
    vllm_config: VllmConfig,
    num_tokens: int | None = None,
    slot_mapping: dict[str, torch.Tensor] | None = None,
) -> Iterator[None]:
    """Runs what is inside as a forward pass of the model of `vllm_config`."""
    from vllm.platforms import current_platform

    context = ForwardContext(
        no_compile_layers=vllm_config.compilation_config.static_forward_context,
        attn_metadata=attn_metadata,
        slot_mapping=slot_mapping or {},
        additional_kwargs=current_platform.set_additional_forward_context(
            attn_metadata=attn_metadata, vllm_config=vllm_config, num_tokens=num_tokens
        ),
    )
    with override_forward_context(context):
        yield

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings. Paper: https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import torch

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("rotary_embedding")
class RotaryEmbeddingBase(CustomOp):
    """The table of cosines and sines, (max_position, rotary_dim) in float32: cosines, then sines.

    It stays in float32: a bfloat16 angle is off by whole degrees.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ValueError(
                f"rotary_dim {rotary_dim} must be even and within the head size {head_size}"
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        if init_cache:
            self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        """(rotary_dim / 2,) float32: by how much each pair of dimensions turns from a position
        to the next."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        return 1.0 / (base**exponents)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, self._compute_inv_freq(self.base))
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def get_cos_sin(self, seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the first `seqlen` positions, each (seqlen, rotary_dim / 2)."""
        return self.cos_sin_cache[:seqlen].chunk(2, dim=-1)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool
) -> torch.Tensor:
    """x (num_tokens, heads, rotary_dim); cos, sin (num_tokens, 1, rotary_dim / 2)."""
    if is_neox_style:  # pairs are (i, i + d/2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    first, second = x[..., ::2], x[..., 1::2]  # pairs are (2i, 2i + 1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


class RotaryEmbedding(RotaryEmbeddingBase):
    """Turns queries and keys by their positions. May change its arguments in place."""

    @staticmethod
    def forward_static(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: torch.Tensor,
        is_neox_style: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The plain torch form, out of place."""
        cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
        cos, sin = (part.unsqueeze(1).to(query.dtype) for part in (cos, sin))

        def turn(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(positions.numel(), -1, head_size)
            turned = _rotate(heads[..., :rotary_dim], cos, sin, is_neox_style)
            return torch.cat((turned, heads[..., rotary_dim:]), dim=-1).view(x.shape)

        return turn(query), None if key is None else turn(key)

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """positions (num_tokens,); query (num_tokens, num_heads * head_size), key with its own
        heads."""
        return self.forward_static(
            positions,
            query,
            key,
            self.head_size,
            self.rotary_dim,
            self.cos_sin_cache,
            self.is_neox_style,
        )

    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same in place: query and key may be views of a fused buffer."""
        cpu_ops.rotary_embedding(
            positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style
        )
        return query, key

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base}, "
            f"is_neox_style={self.is_neox_style}"
        )

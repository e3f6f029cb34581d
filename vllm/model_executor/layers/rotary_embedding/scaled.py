# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings whose frequencies are changed so that a model reaches further than it was
trained."""

from __future__ import annotations

import math

import torch

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Every frequency divided by `scaling_factor` (position interpolation,
    https://arxiv.org/abs/2306.15595)."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
    ) -> None:
        self.scaling_factor = scaling_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return super()._compute_inv_freq(base) / self.scaling_factor


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Llama 3.1's rule: low frequencies divided by `scaling_factor`, high ones kept, a ramp
    between.

    A frequency is low where its wavelength exceeds orig_max_position / low_freq_factor, high where
    it is under orig_max_position / high_freq_factor.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.orig_max_position = orig_max_position
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        inv_freq = super()._compute_inv_freq(base)
        wavelength = 2 * math.pi / inv_freq
        low = self.orig_max_position / self.low_freq_factor
        high = self.orig_max_position / self.high_freq_factor
        divided = inv_freq / self.scaling_factor
        smooth = (self.orig_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        ramp = (1 - smooth) * divided + smooth * inv_freq
        return torch.where(
            wavelength > low, divided, torch.where(wavelength < high, inv_freq, ramp)
        )

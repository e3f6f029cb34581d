# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings whose frequencies are changed so that a model reaches further than it was
trained."""

from __future__ import annotations

import math

import torch

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

# YaRN's bounds between frequencies that are kept and those that are divided, in turns over the
# original length (https://arxiv.org/abs/2309.00071, section 3.2).
_YARN_BETA_FAST = 32
_YARN_BETA_SLOW = 1


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


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK scaling, which changes nothing until a text outgrows `max_position_embeddings`.

    Beyond, all keys of a request would have to turn anew with each token, which cached keys that
    requests share cannot do. The engine refuses requests longer than `max_position_embeddings`
    (`ModelConfig.get_and_verify_max_len`), so the table ends there.
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
    ) -> None:
        self.scaling_factor = scaling_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN: frequencies with few turns over the original length divided by `scaling_factor`, those
    with many kept, a ramp between; cosines and sines times `attention_factor`.

    `attention_factor` left out: the paper's 0.1 ln(scaling_factor) + 1, or where both `mscale`s are
    given the quotient of the two. Paper: https://arxiv.org/abs/2309.00071.
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
        orig_max_position: int,
        attention_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.orig_max_position = orig_max_position
        self.beta_fast = beta_fast or _YARN_BETA_FAST
        self.beta_slow = beta_slow or _YARN_BETA_SLOW
        self.truncate = truncate
        if attention_factor is None:
            attention_factor = _yarn_scale(scaling_factor, 1.0)
            if mscale and mscale_all_dim:
                attention_factor = _yarn_scale(scaling_factor, mscale) / _yarn_scale(
                    scaling_factor, mscale_all_dim
                )
        self.attention_factor = attention_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        kept = super()._compute_inv_freq(base)
        low, high = self._pair_making_turns(self.beta_fast), self._pair_making_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        pairs = torch.arange(len(kept), dtype=torch.float32)
        ramp = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
        return kept / self.scaling_factor * ramp + kept * (1 - ramp)

    def _pair_making_turns(self, num_turns: float) -> float:
        """Which pair of dimensions turns `num_turns` times over the original length."""
        wavelength = self.orig_max_position / num_turns
        return self.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.base))

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return super()._compute_cos_sin_cache() * self.attention_factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

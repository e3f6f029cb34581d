# SPDX-License-Identifier: Apache-2.0
"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """x / rms(x) * weight over the last dimension, worked out in float32.

    Paper: https://arxiv.org/abs/1910.07467. With a residual the two are added first, and both the
    norm of the sum and the sum are returned: (normed, residual). Both arguments may be overwritten
    then.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if var_hidden_size not in (None, hidden_size):
            raise ValueError(
                f"var_hidden_size {var_hidden_size} is not supported; supported: hidden_size"
            )
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.has_weight = has_weight
        weight = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        if has_weight:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight, persistent=False)

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = residual = x + residual
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed = wide.to(x.dtype)
        normed = normed * self.weight if self.has_weight else normed
        return normed if residual is None else (normed, residual)

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return cpu_ops.rms_norm(x, self.weight, self.variance_epsilon)
        normed = cpu_ops.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return normed, residual

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(CustomOp):
    """Gemma's form of `RMSNorm`: x / rms(x) * (1 + weight), rounded once, after the weight. Both
    arguments may be overwritten, as there."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size), requires_grad=False)
        self.variance_epsilon = eps

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = residual = x + residual
        scale = self.weight.float() + 1.0
        normed = F.rms_norm(x.float(), scale.shape, scale, self.variance_epsilon).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        normed = cpu_ops.gemma_rms_norm(x, self.weight, self.variance_epsilon, residual)
        return normed if residual is None else (normed, residual)

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.numel()}, eps={self.variance_epsilon}"


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp):
    """(x - mean) / std * weight + bias over the last dimension. With a residual as `RMSNorm`.

    Paper: https://arxiv.org/abs/1607.06450.
    """

    def __init__(self, dim: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(dim), requires_grad=False) if bias else None
        self.variance_epsilon = eps

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = residual = x + residual
        normed = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.variance_epsilon)
        return normed if residual is None else (normed, residual)

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        normed = cpu_ops.layer_norm(x, self.weight, self.bias, self.variance_epsilon, residual)
        return normed if residual is None else (normed, residual)

    def extra_repr(self) -> str:
        return f"dim={self.weight.numel()}, eps={self.variance_epsilon}"

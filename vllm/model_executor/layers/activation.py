# SPDX-License-Identifier: Apache-2.0
"""Activation functions, alone and gated (`act(gate) * up` of one fused tensor)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """x (..., 2d) -> silu(x[..., :d]) * x[..., d:] (..., d). Paper:
    https://arxiv.org/abs/2002.05202."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.silu_and_mul(x)


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """x (..., 2d) -> gelu(x[..., :d]) * x[..., d:] (..., d). `approximate`: none or tanh."""

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate {approximate!r} is not supported; supported: none, tanh")
        super().__init__()
        self.approximate = approximate

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate=self.approximate) * up

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        if self.approximate == "tanh":
            return cpu_ops.gelu_tanh_and_mul(x)
        return cpu_ops.gelu_and_mul(x)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate}"


@CustomOp.register("gelu")
class GELU(CustomOp):
    """The exact one, by the error function."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gelu(x)


@CustomOp.register("gelu_tanh")
class GELUTanh(CustomOp):
    """Its tanh approximation."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gelu_tanh(x)


@CustomOp.register("gelu_new")
class NewGELU(CustomOp):
    """GELU's tanh approximation as GPT-2 writes it. Paper: https://arxiv.org/abs/1606.08415."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gelu_tanh(x)  # one pass over memory


@CustomOp.register("gelu_fast")
class FastGELU(CustomOp):
    """The same approximation with its constants multiplied out."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@CustomOp.register("quick_gelu")
class QuickGELU(CustomOp):
    """x * sigmoid(1.702 x)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


@CustomOp.register("relu2")
class ReLUSquaredActivation(CustomOp):
    """relu(x) squared. Paper: https://arxiv.org/abs/2109.08668."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(F.relu(x))


_ACTIVATIONS: dict[str, type[nn.Module] | tuple[type[nn.Module], dict[str, str]]] = {
    "gelu": GELU,
    "gelu_fast": FastGELU,
    "gelu_new": NewGELU,
    "gelu_pytorch_tanh": GELUTanh,
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu2": ReLUSquaredActivation,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}
_GATED_ACTIVATIONS = {
    "gelu": GeluAndMul,
    "gelu_new": (GeluAndMul, {"approximate": "tanh"}),
    "gelu_pytorch_tanh": (GeluAndMul, {"approximate": "tanh"}),
    "silu": SiluAndMul,
    "swish": SiluAndMul,
}


def _make(table: dict, name: str, kind: str) -> nn.Module:
    entry = table.get(name.lower())
    if entry is None:
        raise ValueError(f"{kind} {name!r} is not supported; supported: {', '.join(sorted(table))}")
    cls, options = entry if isinstance(entry, tuple) else (entry, {})
    return cls(**options)


def get_act_fn(act_fn_name: str) -> nn.Module:
    """The activation that a config calls by this name. Raises ValueError listing the known ones."""
    return _make(_ACTIVATIONS, act_fn_name, "activation")


def get_act_and_mul_fn(act_fn_name: str) -> nn.Module:
    """The gated activation of this name. Raises ValueError listing the known ones."""
    return _make(_GATED_ACTIVATIONS, act_fn_name, "gated activation")

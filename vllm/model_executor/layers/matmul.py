# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights of the model's dtype, and the form that weights have for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("unquantized_gemm")
class UnquantizedGemm(CustomOp):
    """x (..., in) times weight (out, in) transposed, plus bias (out) -> (..., out)."""

    def forward_native(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def forward_cpu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return cpu_ops.linear(x, weight, bias)


@CustomOp.register("weight_packing")
class WeightPacking(CustomOp):
    """A weight (out, in) in the form in which `UnquantizedGemm` multiplies fastest: itself, unless
    the device has another."""

    def forward_native(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def forward_cpu(self, weight: torch.Tensor) -> torch.Tensor:
        return cpu_ops.pack(weight) if cpu_ops.can_pack(weight) else weight

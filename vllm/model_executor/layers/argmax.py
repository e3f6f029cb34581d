# SPDX-License-Identifier: Apache-2.0
"""The most likely token of each row of logits."""

from __future__ import annotations

import torch

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("argmax")
class Argmax(CustomOp):
    """logits (n, vocab), rows may lie apart -> the place of each row's maximum, (n,) int32, and
    whether it is -inf, (n,) bool. Of equal ones the first; NaN is the largest."""

    def forward_native(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = logits.argmax(dim=-1)
        largest = logits.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        return places.to(torch.int32), largest == -torch.inf

    def forward_cpu(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cpu_ops.argmax(logits)

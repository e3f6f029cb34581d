# SPDX-License-Identifier: Apache-2.0
"""Embeddings of positions that are learned, added to those of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import cpu_ops


@CustomOp.register("learned_positions")
class LearnedPositions(CustomOp):
    """Embeddings (num_tokens, size), positions (num_tokens,) int64 -> their sum with a row of `weight`
    (offset + num_positions, size) each. `offset`: rows in front that no token has."""

    def __init__(self, num_positions: int, size: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(offset + num_positions, size), requires_grad=False)

    def forward_native(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embeddings + F.embedding(positions + self.offset, self.weight)

    def forward_cpu(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return cpu_ops.add_table_rows(embeddings, positions, self.weight, self.offset)

    def extra_repr(self) -> str:
        rows, size = self.weight.shape
        return f"num_positions={rows - self.offset}, size={size}, offset={self.offset}"

# SPDX-License-Identifier: Apache-2.0
"""Logits from one recording, beside that of the forward pass: threads that run recordings are awake
then, and none waits for one that the system does not let run.

    hidden states (40, hidden) | rows that are sampled after
                               v gathered to the head of
    static rows                | as many as were recorded, what lies behind is not read
                               v read by
    graph                      -> logits (3, vocab)
"""

from __future__ import annotations

import torch
from torch import nn

from vllm.platforms.static_graph import SizedGraph


class LogitsGraph:
    """`model`'s logits after up to `max_num_rows` rows of hidden states (hidden_size,).

    Raises:
        RuntimeError: its `compute_logits` cannot be recorded.
    """

    def __init__(
        self,
        graph_cls: type[SizedGraph],
        model: nn.Module,
        max_num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_num_rows = max_num_rows
        self._rows = torch.zeros(max_num_rows, hidden_size, dtype=dtype, device=device)
        self._graph = graph_cls(
            lambda: model.compute_logits(self._rows), max_num_rows, max_num_rows
        )

    def replay(self, hidden_states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) after the rows `places` (n,) of hidden_states (num_tokens, hidden), n at
        most `max_num_rows`. They hold until a graph is replayed again."""
        num_rows = len(places)
        torch.index_select(hidden_states, 0, places, out=self._rows[:num_rows])
        return self._graph.replay(num_rows, num_rows)

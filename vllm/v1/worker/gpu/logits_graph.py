# SPDX-License-Identifier: Apache-2.0
"""Logits from one recording, beside that of the forward pass: threads that run recordings are awake
then, and none waits for one that the system does not let run.

    what a forward graph writes: hidden states (40, hidden)
                               v rows that are sampled after
    graph                      -> logits (3, vocab)
"""

from __future__ import annotations

import torch
from torch import nn

from vllm.model_executor.layers.vocab_parallel_embedding import EmbeddingLookup
from vllm.platforms.static_graph import SizedGraph


class LogitsGraph:
    """`model`'s logits after up to `max_num_rows` rows of `hidden_states` (num_tokens, hidden), which
    stay in place.

    Raises:
        RuntimeError: its `compute_logits` cannot be recorded.
    """

    def __init__(
        self,
        graph_cls: type[SizedGraph],
        model: nn.Module,
        hidden_states: torch.Tensor,
        max_num_rows: int,
    ) -> None:
        self.max_num_rows = max_num_rows
        self._places = torch.zeros(max_num_rows, dtype=torch.int32, device=hidden_states.device)
        lookup = EmbeddingLookup()
        self._graph = graph_cls(
            lambda: model.compute_logits(lookup(self._places, hidden_states)),
            max_num_rows,
            max_num_rows,
        )

    def replay(self, places: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) after the rows `places` (n,) int32, n at most `max_num_rows`. They hold
        until the next call."""
        num_rows = len(places)
        self._places[:num_rows].copy_(places)
        return self._graph.replay(num_rows, num_rows)

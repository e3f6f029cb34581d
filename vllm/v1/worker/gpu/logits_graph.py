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
    """`model`'s logits after the rows `places` (max_num_rows,) int32 of `hidden_states` (num_tokens,
    hidden), or the first of them; both stay in place.

    Raises:
        RuntimeError: its `compute_logits` cannot be recorded.
    """

    def __init__(
        self,
        graph_cls: type[SizedGraph],
        model: nn.Module,
        hidden_states: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        self.max_num_rows = len(places)
        lookup = EmbeddingLookup()
        self._graph = graph_cls(
            lambda: model.compute_logits(lookup(places, hidden_states)), len(places), len(places)
        )

    def replay(self, num_rows: int) -> torch.Tensor:
        """Logits (num_rows, vocab) after the first rows, as `places` says at the moment. They hold
        until the next call."""
        return self._graph.replay(num_rows, num_rows)

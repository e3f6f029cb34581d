# SPDX-License-Identifier: Apache-2.0
"""What changes a request's logits before a token is drawn: one feature a class, a class a file."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.states import RequestState


class LogitsFeature(ABC):
    """Keeps by row what the requests that use it want; a batch without such a one costs nothing."""

    def __init__(self) -> None:
        self._wanted: dict[int, object] = {}

    def add_request(self, row: int, params: SamplingParams) -> None:
        """A request got `row`; forgets what the row's request before wanted."""
        self._wanted.pop(row, None)
        wanted = self.wanted_by(params)
        if wanted is not None:
            self._wanted[row] = wanted

    def has_request(self, row: int) -> bool:
        """Whether the request of `row` uses the feature."""
        return row in self._wanted

    def applies(self, row: int, states: RequestState) -> bool:
        """Whether the logits of the request of `row` are changed before its next token."""
        return row in self._wanted and self.is_due(self._wanted[row], row, states)

    def apply(self, logits: torch.Tensor, rows: np.ndarray, states: RequestState) -> None:
        """Changes logits (n, vocab) float32 in place; logits[i] is of the request of rows[i]."""
        if not self._wanted:
            return
        for i, row in enumerate(rows.tolist()):
            if self.applies(row, states):
                self.apply_row(logits[i], self._wanted[row], row, states)

    def is_due(self, wanted: object, row: int, states: RequestState) -> bool:
        """Whether a request that uses the feature is affected before its next token."""
        return True

    @abstractmethod
    def wanted_by(self, params: SamplingParams) -> object | None:
        """What `apply_row` needs for such a request; None: it does not use the feature."""

    @abstractmethod
    def apply_row(
        self, logits: torch.Tensor, wanted: object, row: int, states: RequestState
    ) -> None:
        """Changes one request's logits (vocab,) in place."""

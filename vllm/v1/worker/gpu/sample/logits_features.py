# SPDX-License-Identifier: Apache-2.0
"""What changes a request's logits before a token is drawn: one feature a class."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.states import RequestState


class LogitsFeature(ABC):
    """Keeps what it needs by row; a batch in which no request uses it costs nothing."""

    @abstractmethod
    def add_request(self, row: int, params: SamplingParams) -> None:
        """A request got `row`; forgets what the row's request before wanted."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: np.ndarray, states: RequestState) -> None:
        """Changes logits (n, vocab) float32 in place; logits[i] is of the request of rows[i]."""


class MinTokens(LogitsFeature):
    """`min_tokens`: until then nothing that would end the request."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[int, list[int]]] = {}

    def add_request(self, row: int, params: SamplingParams) -> None:
        self._wanted.pop(row, None)
        if params.min_tokens and params.all_stop_token_ids:
            self._wanted[row] = (params.min_tokens, sorted(params.all_stop_token_ids))

    def apply(self, logits: torch.Tensor, rows: np.ndarray, states: RequestState) -> None:
        if not self._wanted:
            return
        for i, row in enumerate(rows.tolist()):
            min_tokens, stop_token_ids = self._wanted.get(row, (0, []))
            if states.total_len[row] - states.prompt_len[row] < min_tokens:
                logits[i, stop_token_ids] = -torch.inf

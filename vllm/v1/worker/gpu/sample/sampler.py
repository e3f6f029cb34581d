# SPDX-License-Identifier: Apache-2.0
"""Logits in, tokens out."""

from __future__ import annotations

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.sample.features import make_features
from vllm.v1.worker.gpu.sample.filters import apply_min_p, apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logprobs import gather_logprobs
from vllm.v1.worker.gpu.sample.random import request_seed, uniform
from vllm.v1.worker.gpu.states import RequestState

_NO_LOGPROBS = -2
_ALL_LOGPROBS = -1
_SEED_BITS = (1 << 64) - 1


class Sampler:
    """Draws a token for each request of a batch as its sampling parameters say.

    In order: logprobs of the raw logits, `features`, temperature, min_p, top_k
    and top_p, the draw. Greedy requests take the most likely token after the features.
    """

    def __init__(self, max_num_reqs: int, engine_seed: int, device: torch.device) -> None:
        self._device = device
        self._engine_seed = engine_seed
        self._temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self._top_p = np.ones(max_num_reqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self._min_p = np.zeros(max_num_reqs, dtype=np.float32)
        self._seed = np.zeros(max_num_reqs, dtype=np.uint64)
        self._num_logprobs = np.full(max_num_reqs, _NO_LOGPROBS, dtype=np.int32)
        self._features = make_features()

    def add_request(self, row: int, req_id: str, params: SamplingParams) -> None:
        """A request got `row`."""
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k
        self._min_p[row] = params.min_p
        seed = request_seed(self._engine_seed, req_id) if params.seed is None else params.seed
        self._seed[row] = seed & _SEED_BITS
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        for feature in self._features:
            feature.add_request(row, params)

    def __call__(
        self, logits: torch.Tensor, rows: np.ndarray, states: RequestState
    ) -> SamplerOutput:
        """Samples after `logits` (n, vocab), which are changed; logits[i] is of rows[i]'s request."""
        logits = logits.float()
        num_logprobs = self._max_num_logprobs(rows, logits.shape[-1])
        raw = logits.clone() if num_logprobs is not None else None
        for feature in self._features:
            feature.apply(logits, rows, states)
        token_ids = self._draw(logits, rows, states.total_len[rows])
        logprobs = None if raw is None else gather_logprobs(raw, token_ids, num_logprobs)
        return SamplerOutput(token_ids.to(torch.int32).unsqueeze(-1), logprobs)

    def _max_num_logprobs(self, rows: np.ndarray, vocab_size: int) -> int | None:
        wanted = self._num_logprobs[rows]
        if (wanted == _NO_LOGPROBS).all():
            return None
        return vocab_size if (wanted == _ALL_LOGPROBS).any() else int(wanted.max())

    def _draw(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        random = self._temperature[rows] > 0
        if not random.any():
            return logits.argmax(dim=-1)
        if random.all():
            return self._draw_random(logits, rows, positions)
        token_ids = logits.argmax(dim=-1)
        picked = torch.from_numpy(np.flatnonzero(random)).to(self._device)
        token_ids[picked] = self._draw_random(logits[picked], rows[random], positions[random])
        return token_ids

    def _draw_random(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        logits /= self._on_device(self._temperature, rows).unsqueeze(-1)
        if (self._min_p[rows] > 0).any():
            apply_min_p(logits, self._on_device(self._min_p, rows))
        if (self._top_k[rows] > 0).any() or (self._top_p[rows] < 1).any():
            top_k = self._on_device(self._top_k, rows)
            apply_top_k_top_p(logits, top_k, self._on_device(self._top_p, rows))
        # Inverse of the cumulative distribution: one draw a request, whatever the vocabulary.
        cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        draws = torch.from_numpy(uniform(self._seed[rows], positions)).to(self._device)
        threshold = draws.unsqueeze(-1) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)

    def _on_device(self, values: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(self._device)

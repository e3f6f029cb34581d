# SPDX-License-Identifier: Apache-2.0
"""Logits in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm.model_executor.layers.argmax import Argmax
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.custom import CustomLogitsProcessors
from vllm.v1.worker.gpu.sample.features import ForcedEos, Penalties, make_features
from vllm.v1.worker.gpu.sample.filters import apply_min_p, apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logprobs import gather_logprobs
from vllm.v1.worker.gpu.sample.random import request_seed, uniform
from vllm.v1.worker.gpu.states import RequestState

NOTHING_TO_TAKE = (
    "every token is forbidden: look at allowed_token_ids, bad_words, logit_bias, min_tokens, "
    "no_repeat_ngram_size and logits processors"
)
_NO_LOGPROBS = -2
_ALL_LOGPROBS = -1
_SEED_BITS = (1 << 64) - 1


class Sampler:
    """Draws a token for each request of a batch as its sampling parameters say.

    In order: logprobs of the raw logits; `features`; logits processors that are not built in;
    penalties; a forced end; temperature; those processors that change no argmax; min_p, top_k and
    top_p; the draw. Greedy requests take the most likely token after the forced end.

    Where that is all that is wanted of a batch it is read in the dtype that it has.

    Of requests that go on with a beam all this changes logprobs rather than logits, and it is these
    changed ones that are told: not normalised again, as sequences are compared by their sums.
    """

    def __init__(
        self,
        max_num_reqs: int,
        engine_seed: int,
        device: torch.device,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._device = device
        self._engine_seed = engine_seed
        self._temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self._top_p = np.ones(max_num_reqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self._min_p = np.zeros(max_num_reqs, dtype=np.float32)
        self._seed = np.zeros(max_num_reqs, dtype=np.uint64)
        self._num_logprobs = np.full(max_num_reqs, _NO_LOGPROBS, dtype=np.int32)
        self._logprob_token_ids: dict[int, list[int]] = {}
        self._is_beam = np.zeros(max_num_reqs, dtype=bool)
        # Rows that may want more than the most likely token: whether they do in each step.
        self._special_rows: dict[int, bool] = {}
        self._argmax = Argmax().dispatch_forward()
        self._features = make_features()
        self._penalties = Penalties()
        self._forced_eos = ForcedEos()
        self._all_features = (*self._features, self._penalties, self._forced_eos)
        self._custom = CustomLogitsProcessors(logits_processors)

    def add_request(self, row: int, req_id: str, params: SamplingParams) -> None:
        """A request got `row`."""
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k
        self._min_p[row] = params.min_p
        seed = request_seed(self._engine_seed, req_id) if params.seed is None else params.seed
        self._seed[row] = seed & _SEED_BITS
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._is_beam[row] = params.beam_search is not None
        self._logprob_token_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self._logprob_token_ids[row] = params.logprob_token_ids
            self._num_logprobs[row] = 0
        for feature in self._all_features:
            feature.add_request(row, params)
        self._special_rows.pop(row, None)
        is_plain = params.temperature == 0 and self._num_logprobs[row] == _NO_LOGPROBS
        if not is_plain or any(feature.has_request(row) for feature in self._all_features):
            self._special_rows[row] = not is_plain
        self._custom.add_request(row, req_id, params)

    def __call__(
        self, logits: torch.Tensor, rows: np.ndarray, states: RequestState
    ) -> SamplerOutput:
        """Samples after `logits` (n, vocab), which are changed; logits[i] is of rows[i]'s request."""
        if self._takes_argmax(rows, states):
            token_ids, has_none = self._argmax(logits)
            return SamplerOutput(token_ids.unsqueeze(-1), None, has_none)
        logits = logits.float()
        beams = torch.from_numpy(np.flatnonzero(self._is_beam[rows])).to(self._device)
        if len(beams):
            logits[beams] = logits[beams].log_softmax(dim=-1)
        wants_logprobs = (self._num_logprobs[rows] != _NO_LOGPROBS).any()
        raw = logits.clone() if wants_logprobs else None
        for feature in self._features:
            feature.apply(logits, rows, states)
        self._custom.update(rows, states)
        logits = self._custom.apply(logits, rows)
        self._penalties.apply(logits, rows, states)
        self._forced_eos.apply(logits, rows, states)
        if len(beams):
            raw = raw.log_softmax(dim=-1)
            raw[beams] = logits[beams]
        token_ids = self._draw(logits, rows, states.total_len[rows])
        # Of requests that go on with a beam the search decides: others of its beams may go on.
        has_none = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) == -torch.inf
        has_none[beams] = False
        logprobs = None if raw is None else self._logprobs(raw, token_ids, rows, len(beams) > 0)
        return SamplerOutput(token_ids.to(torch.int32).unsqueeze(-1), logprobs, has_none)

    def _takes_argmax(self, rows: np.ndarray, states: RequestState) -> bool:
        """Whether all of `rows` take the most likely token of the logits as they are."""
        if self._custom.exist:
            return False
        if not self._special_rows:
            return True
        special = [row for row in rows.tolist() if row in self._special_rows]
        return not any(
            self._special_rows[row] or any(f.applies(row, states) for f in self._all_features)
            for row in special
        )

    def _logprobs(
        self, raw: torch.Tensor, token_ids: torch.Tensor, rows: np.ndarray, are_logprobs: bool
    ) -> LogprobsTensors:
        wanted = self._num_logprobs[rows]
        wants_all = (wanted == _ALL_LOGPROBS).any()
        num_logprobs = raw.shape[-1] if wants_all else min(int(wanted.max()), raw.shape[-1])
        named = self._logprob_token_ids
        if named:
            named = {i: named[row] for i, row in enumerate(rows.tolist()) if row in named}
        return gather_logprobs(raw, token_ids, num_logprobs, named, are_logprobs)

    def _draw(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        random = self._temperature[rows] > 0
        if not random.any():
            return logits.argmax(dim=-1)
        if random.all():
            scaled = self._custom.apply_scaled(self._scale(logits, rows), rows)
            return self._draw_random(scaled, rows, positions)
        token_ids = logits.argmax(dim=-1)
        picked = torch.from_numpy(np.flatnonzero(random)).to(self._device)
        if self._custom.have_scaled:
            scaled = self._custom.apply_scaled(self._scale(logits, rows), rows)[picked]
        else:
            scaled = self._scale(logits[picked], rows[random])
        token_ids[picked] = self._draw_random(scaled, rows[random], positions[random])
        return token_ids

    def _scale(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Divided by the temperature, in place; greedy rows stay as they are."""
        temperature = self._on_device(self._temperature, rows)
        return logits.div_(torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1))

    def _draw_random(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        if (self._min_p[rows] > 0).any():
            apply_min_p(logits, self._on_device(self._min_p, rows))
        if (self._top_k[rows] > 0).any() or (self._top_p[rows] < 1).any():
            top_k = self._on_device(self._top_k, rows)
            apply_top_k_top_p(logits, top_k, self._on_device(self._top_p, rows))
        # Inverse of the cumulative distribution: one draw a request, whatever the vocabulary.
        cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        draws = torch.from_numpy(uniform(self._seed[rows], positions)).to(self._device)
        total = cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, draws.unsqueeze(-1) * total, right=True).squeeze(-1)
        # Every token forbidden, or no numbers: there is nothing to draw from. Whatever is taken must
        # be a token, for a neighbour's sake.
        return torch.where(total.squeeze(-1) > 0, drawn, logits.argmax(dim=-1))

    def _on_device(self, values: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(self._device)

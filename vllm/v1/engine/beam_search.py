# SPDX-License-Identifier: Apache-2.0
"""Beam search over one prompt: scores in, the next tokens of each beam out, as Transformers'
`generate(num_beams=k, do_sample=False)` decides it (5.24, `GenerationMixin._beam_search`).

Scores are float32, as there: sums of logprobs are rounded alike, so close calls end alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm.sampling_params import BeamSearchParams
from vllm.v1.outputs import LogprobsLists


class Candidates(NamedTuple):
    """The best next tokens of one beam, best first.

    token_ids: (num_candidates,) int32; logprobs: (num_candidates,) float32, of which tokens that
    may not be taken have -inf.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Beam:
    """A sequence, as its last token and the beam that it goes on with. `score`: the sum of its
    logprobs, float32. `candidates`: those its last token was one of, if they are to be told."""

    score: np.float32
    token_id: int = -1
    parent: Beam | None = None
    candidates: Candidates | None = None

    def path(self) -> list[Beam]:
        """A beam for each token, the first token's first."""
        beams, beam = [], self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]

    def token_ids(self) -> list[int]:
        """All tokens of the sequence."""
        return [beam.token_id for beam in self.path()]


class FinishedBeam(NamedTuple):
    """A sequence that has ended. `score`: its sum of logprobs, divided as `length_penalty` says."""

    score: np.float32
    beam: Beam


class BeamSearch:
    """`running` are the beams that wait for their candidates, best first; `finished` the best
    sequences that have ended, best first.

    Args:
        max_tokens: of a sequence; what the model's length allows, too.
        stop_token_ids: tokens that end a sequence.
        num_counted_before: tokens of the prompt that count as generated for a sequence's length.
        num_told: candidates to keep for `logprobs_of`; None: none.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        num_counted_before: int = 0,
        num_told: int | None = None,
    ) -> None:
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._num_counted_before = num_counted_before
        self._num_told = num_told
        self._num_tokens = 0
        self.running = [Beam(np.float32(0.0))]
        self.finished: list[FinishedBeam] = []

    @property
    def num_candidates(self) -> int:
        """Candidates of a beam that `advance` looks at: enough that `beam_width` sequences run on
        even if each beam's best tokens are all those that end one."""
        return max(2, 1 + len(self._stop_token_ids)) * self._width

    @property
    def is_done(self) -> bool:
        """Whether `finished` is the result."""
        return not self.running

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Takes in the candidates of each of `running`, in order, and replaces those."""
        self._num_tokens += 1
        best = self._best_candidates(candidates)
        is_last = self._num_tokens >= self._max_tokens
        ends = [is_last or beam.token_id in self._stop_token_ids for beam in best]
        # Of what ends, only the best count; the rest were looked at for the sake of those that run.
        ended = [beam for beam, has_ended in zip(best[: self._width], ends) if has_ended]
        self._finish(ended)
        self.running = [beam for beam, end in zip(best, ends) if not end][: self._width]
        if self.running and not self._goes_on():
            self.running = []

    def _best_candidates(self, candidates: Sequence[Candidates]) -> list[Beam]:
        sums = np.stack(
            [beam.score + each.logprobs for beam, each in zip(self.running, candidates)]
        )
        num_columns = sums.shape[1]
        sums = np.where(np.isfinite(sums), sums, -np.inf).ravel()
        order = np.argsort(-sums, kind="stable")[: self.num_candidates].tolist()
        best = []
        for place in order:
            if sums[place] == -np.inf:
                break
            source, column = divmod(place, num_columns)
            row = candidates[source]
            told = None if self._num_told is None else row
            token_id = int(row.token_ids[column])
            best.append(Beam(sums[place], token_id, self.running[source], told))
        return best

    def _finish(self, ended: list[Beam]) -> None:
        divisor = self._divisor(self._num_tokens)
        with np.errstate(divide="ignore", invalid="ignore"):
            new = [FinishedBeam(beam.score / divisor, beam) for beam in ended]
        # Sorting is stable: of equal ones the older comes first.
        everything = sorted([*self.finished, *new], key=lambda each: -each.score)
        self.finished = everything[: self._width]

    def _divisor(self, num_tokens: int) -> np.float32:
        with np.errstate(over="ignore", under="ignore"):
            return np.float32((num_tokens + self._num_counted_before) ** self._length_penalty)

    def _goes_on(self) -> bool:
        """Whether the running beams may still change the result."""
        if len(self.finished) < self._width:
            return True
        if self._early_stopping is True:
            return False
        num_tokens = self._num_tokens
        if self._early_stopping == "never" and self._length_penalty > 0:
            num_tokens = self._max_tokens
        with np.errstate(divide="ignore", invalid="ignore"):
            reachable = self.running[0].score / self._divisor(num_tokens)
        return bool(reachable > self.finished[-1].score)

    def ends_with_stop_token(self, beam: Beam) -> bool:
        """Whether it ended by a token rather than by its length."""
        return beam.token_id in self._stop_token_ids

    def logprobs_of(self, beam: Beam) -> LogprobsLists | None:
        """A row for each token of a sequence; None unless candidates were kept."""
        if self._num_told is None:
            return None
        path = beam.path()
        told = min(self._num_told, *(len(each.candidates.token_ids) for each in path))
        taken_ids = np.array([[each.token_id] for each in path], dtype=np.int32)
        ranks = [_rank_of(each) for each in path]
        taken = [[each.candidates.logprobs[rank - 1]] for each, rank in zip(path, ranks)]
        return LogprobsLists(
            np.hstack([taken_ids, np.stack([each.candidates.token_ids[:told] for each in path])]),
            np.hstack(
                [
                    np.array(taken, dtype=np.float32),
                    np.stack([each.candidates.logprobs[:told] for each in path]),
                ]
            ),
            np.array(ranks, dtype=np.int32),
        )


def _rank_of(beam: Beam) -> int:
    """The place of a beam's last token among its candidates; 1 is the best."""
    return int(np.flatnonzero(beam.candidates.token_ids == beam.token_id)[0]) + 1

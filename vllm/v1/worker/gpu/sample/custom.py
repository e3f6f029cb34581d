# SPDX-License-Identifier: Apache-2.0
"""Logits processors that are not built in. They see a batch without holes, in an order of its own;
rows of the request states have holes, and a step samples them in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.logits_processor.interface import AddedRequest, MovedRequest
from vllm.v1.worker.gpu.states import RequestState


@dataclass
class _Member:
    """A request as the processors know it. `output_token_ids` is theirs too, and grows."""

    row: int
    req_id: str
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)

    def is_alive(self, states: RequestState) -> bool:
        return states.req_id_to_index.get(self.req_id) == self.row

    def sync(self, states: RequestState) -> None:
        """Takes over the tokens that were drawn since."""
        begin = states.prompt_len[self.row] + len(self.output_token_ids)
        new = states.all_token_ids[self.row, begin : states.total_len[self.row]]
        self.output_token_ids.extend(new.tolist())


class CustomLogitsProcessors:
    """Keeps the processors' batch: `_members[i]` is the request at their index i. A request enters
    with its first draw and stays, also through steps without one, until it has ended."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)
        self._unscaled = [p for p in processors if not p.is_argmax_invariant()]
        self._scaled = [p for p in processors if p.is_argmax_invariant()]
        self._members: list[_Member] = []
        self._coming: dict[int, _Member] = {}

    @property
    def exist(self) -> bool:
        """Whether there are any, which want to know of each step."""
        return bool(self._processors)

    @property
    def have_scaled(self) -> bool:
        """Whether `apply_scaled` does anything."""
        return bool(self._scaled)

    def add_request(self, row: int, req_id: str, params: SamplingParams) -> None:
        """A request got `row`."""
        if self._processors:
            self._coming[row] = _Member(row, req_id, params)

    def update(self, rows: np.ndarray, states: RequestState) -> None:
        """Tells the processors who is in the step that samples `rows`."""
        if not self._processors:
            return
        removed, added, moved = self._rearrange(rows.tolist(), states)
        update = None
        if removed or added or moved:
            update = BatchUpdate(len(self._members), removed, added, moved)
        for member in self._members:
            member.sync(states)
        for processor in self._processors:
            processor.update_state(update)

    def _rearrange(
        self, rows: list[int], states: RequestState
    ) -> tuple[list[int], list[AddedRequest], list[MovedRequest]]:
        members = self._members
        holes = [
            index
            for index, member in enumerate(members)
            if member.row in self._coming or not member.is_alive(states)
        ]
        added: list[AddedRequest] = []
        for member in [self._coming.pop(row) for row in rows if row in self._coming]:
            index = holes.pop(0) if holes else len(members)
            members[index : index + 1] = [member]
            prompt = states.all_token_ids[member.row, : states.prompt_len[member.row]]
            added.append((index, member.params, prompt.tolist(), member.output_token_ids))
        removed, moved = list(holes), []
        while holes:
            last = len(members) - 1
            if holes[-1] == last:
                holes.pop()
            else:
                hole = holes.pop(0)
                members[hole] = members[last]
                moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
            members.pop()
        return removed, added, moved

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Processors that may change which token is the most likely.

        logits: (n, vocab) float32, logits[i] of rows[i]'s request.
        """
        return self._run(self._unscaled, logits, rows)

    def apply_scaled(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """The others, for logits that were divided by the temperature."""
        return self._run(self._scaled, logits, rows)

    def _run(
        self, processors: list[LogitsProcessor], logits: torch.Tensor, rows: np.ndarray
    ) -> torch.Tensor:
        if not processors:
            return logits
        index_of = {member.row: index for index, member in enumerate(self._members)}
        places = torch.tensor([index_of[row] for row in rows.tolist()], device=logits.device)
        batch = logits.new_zeros(len(self._members), logits.shape[-1])
        batch[places] = logits
        for processor in processors:
            batch = processor.apply(batch)
        return batch[places]

# SPDX-License-Identifier: Apache-2.0
"""Logprobs of a prompt's tokens, gathered over the steps that compute it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm.v1.outputs import LogprobsLists
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprobs import gather_logprobs
from vllm.v1.worker.gpu.states import RequestState

# Prompt positions whose logits are held at once: they are as wide as the vocabulary.
_POSITIONS_AT_ONCE = 256


class PromptLogprobs:
    """Position p of a prompt says how likely token p + 1 was; the last position is the sampler's."""

    def __init__(self) -> None:
        self._num_logprobs: dict[str, int] = {}
        self._chunks: dict[str, list[LogprobsLists]] = {}

    def add_request(self, req_id: str, num_prompt_logprobs: int | None) -> None:
        """A request begins; None: it wants no logprobs of its prompt."""
        if num_prompt_logprobs is not None:
            self._num_logprobs[req_id] = num_prompt_logprobs
            self._chunks[req_id] = []

    def remove_request(self, req_id: str) -> None:
        """A request is gone."""
        self._num_logprobs.pop(req_id, None)
        self._chunks.pop(req_id, None)

    def compute(
        self,
        batch: InputBatch,
        states: RequestState,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, LogprobsLists | None]:
        """The logprobs of each prompt that this batch completes; rows as in `LogprobsLists`."""
        done: dict[str, LogprobsLists | None] = {}
        if not self._num_logprobs:
            return done
        for i, req_id in enumerate(batch.req_ids):
            if req_id not in self._num_logprobs:
                continue
            row, computed = batch.rows[i], int(batch.num_computed_tokens[i])
            last = int(states.prompt_len[row]) - 1
            end = min(int(batch.seq_lens_np[i]), last)
            offset = int(batch.query_start_loc_np[i]) - computed
            for begin in range(computed, end, _POSITIONS_AT_ONCE):
                stop = min(begin + _POSITIONS_AT_ONCE, end)
                logits = compute_logits(hidden_states[offset + begin : offset + stop])
                next_ids = states.all_token_ids[row, begin + 1 : stop + 1]
                self._add_chunk(req_id, logits, next_ids)
            if end == last:
                done[req_id] = _concatenate(self._chunks[req_id])
                self.remove_request(req_id)
        return done

    def _add_chunk(self, req_id: str, logits: torch.Tensor, next_ids: np.ndarray) -> None:
        wanted = self._num_logprobs[req_id]
        num_logprobs = logits.shape[-1] if wanted == -1 else wanted
        ids = torch.from_numpy(next_ids).to(logits.device)
        self._chunks[req_id].append(gather_logprobs(logits.float(), ids, num_logprobs).tolists())


def _concatenate(chunks: list[LogprobsLists]) -> LogprobsLists | None:
    if not chunks:
        return None
    return LogprobsLists(*(np.concatenate([chunk[i] for chunk in chunks]) for i in range(3)))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class _Penalties(NamedTuple):
    repetition: float
    frequency: float
    presence: float


class Penalties(LogitsFeature):
    """`repetition_penalty` over prompt and output (Keskar et al., "CTRL", 2019: a positive logit is
    divided by it, a negative one multiplied); `frequency_penalty` for each time a token is in the
    output, `presence_penalty` once, as the OpenAI API defines them.

    Nothing is counted ahead: the tokens are in the request's row, so that a preempted request goes
    on as it was.
    """

    def wanted_by(self, params: SamplingParams) -> _Penalties | None:
        penalties = _Penalties(
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        return None if penalties == _Penalties(1.0, 0.0, 0.0) else penalties

    def apply_row(
        self, logits: torch.Tensor, wanted: _Penalties, row: int, states: RequestState
    ) -> None:
        tokens = states.all_token_ids[row, : states.total_len[row]]
        if wanted.repetition != 1.0:
            seen = torch.from_numpy(np.unique(tokens)).long().to(logits.device)
            values = logits[seen]
            factor = wanted.repetition
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        output, counts = np.unique(tokens[states.prompt_len[row] :], return_counts=True)
        if len(output) and (wanted.frequency or wanted.presence):
            penalty = wanted.frequency * counts + wanted.presence
            drawn = torch.from_numpy(output).long().to(logits.device)
            logits[drawn] -= torch.from_numpy(penalty).to(logits.device, logits.dtype)

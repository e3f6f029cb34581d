# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class AllowedTokenIds(LogitsFeature):
    """`allowed_token_ids`: no other token may be drawn."""

    def wanted_by(self, params: SamplingParams) -> torch.Tensor | None:
        if params.allowed_token_ids is None:
            return None
        return torch.tensor(params.allowed_token_ids, dtype=torch.int64)

    def apply_row(
        self, logits: torch.Tensor, wanted: torch.Tensor, row: int, states: RequestState
    ) -> None:
        allowed = wanted.to(logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept

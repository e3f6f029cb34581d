# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class LogitBias(LogitsFeature):
    """`logit_bias`: added to the logits of the tokens it names."""

    def wanted_by(self, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not params.logit_bias:
            return None
        token_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        return token_ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def apply_row(
        self,
        logits: torch.Tensor,
        wanted: tuple[torch.Tensor, torch.Tensor],
        row: int,
        states: RequestState,
    ) -> None:
        token_ids, bias = wanted
        logits.index_add_(0, token_ids.to(logits.device), bias.to(logits.device))

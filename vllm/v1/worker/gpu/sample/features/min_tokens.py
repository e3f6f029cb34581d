# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class MinTokens(LogitsFeature):
    """`min_tokens`: until then nothing that would end the request."""

    def wanted_by(self, params: SamplingParams) -> tuple[int, list[int]] | None:
        if not params.min_tokens or not params.all_stop_token_ids:
            return None
        return params.min_tokens, sorted(params.all_stop_token_ids)

    def is_due(self, wanted: tuple[int, list[int]], row: int, states: RequestState) -> bool:
        return states.total_len[row] - states.prompt_len[row] < wanted[0]

    def apply_row(
        self, logits: torch.Tensor, wanted: tuple[int, list[int]], row: int, states: RequestState
    ) -> None:
        logits[wanted[1]] = -torch.inf

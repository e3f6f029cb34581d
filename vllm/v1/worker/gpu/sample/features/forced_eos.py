# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class ForcedEos(LogitsFeature):
    """`forced_eos_token_id`: the only tokens that can be the last of `max_tokens`. Comes last, over
    whatever else is forbidden, as in Transformers."""

    def wanted_by(self, params: SamplingParams) -> tuple[int, list[int]] | None:
        if params.forced_eos_token_id is None or params.ignore_eos or params.max_tokens is None:
            return None
        return params.max_tokens, params.forced_eos_token_id

    def is_due(self, wanted: tuple[int, list[int]], row: int, states: RequestState) -> bool:
        return states.total_len[row] - states.prompt_len[row] == wanted[0] - 1

    def apply_row(
        self, logits: torch.Tensor, wanted: tuple[int, list[int]], row: int, states: RequestState
    ) -> None:
        logits.fill_(-torch.inf)
        logits[wanted[1]] = 0.0

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class BadWords(LogitsFeature):
    """`bad_words`: the last token of a word is forbidden where the output ends in the others."""

    def wanted_by(self, params: SamplingParams) -> list[list[int]] | None:
        return params.bad_words_token_ids or None

    def apply_row(
        self, logits: torch.Tensor, wanted: list[list[int]], row: int, states: RequestState
    ) -> None:
        output = states.all_token_ids[row, states.prompt_len[row] : states.total_len[row]]
        for *before, last in wanted:
            if len(before) <= len(output) and output[len(output) - len(before) :].tolist() == before:
                logits[last] = -torch.inf

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.states import RequestState


class NoRepeatNgram(LogitsFeature):
    """`no_repeat_ngram_size`: forbids what would end a run of so many tokens a second time, as
    Transformers' `NoRepeatNGramLogitsProcessor` does."""

    def wanted_by(self, params: SamplingParams) -> int | None:
        return params.no_repeat_ngram_size or None

    def apply_row(self, logits: torch.Tensor, wanted: int, row: int, states: RequestState) -> None:
        tokens = states.all_token_ids[row, : states.total_len[row]]
        if len(tokens) < wanted:
            return
        windows = np.lib.stride_tricks.sliding_window_view(tokens, wanted)
        last = tokens[len(tokens) - wanted + 1 :]
        repeated = windows[(windows[:, :-1] == last).all(axis=1), -1]
        logits[torch.from_numpy(repeated).long().to(logits.device)] = -torch.inf

# SPDX-License-Identifier: Apache-2.0
"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logprobs import PromptLogprobs, SampleLogprobs

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import RequestStateStats


@dataclass
class CompletionOutput:
    """One completion of a request.

    `finish_reason` is None while it runs, then stop, length, abort or error; `stop_reason` is the
    stop string or stop token id, None for the end-of-sequence token. `beam_score` is a beam search's.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    beam_score: float | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The outputs of a request, as its `output_kind` asks for them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Takes in a later output. `aggregate`: deltas are joined; else the later one counts."""
        self.finished |= next_output.finished
        self.metrics = next_output.metrics
        self.kv_transfer_params = next_output.kv_transfer_params
        if self.prompt_logprobs is None:
            # Told once by each completion; the one that was taken in first may have told it before.
            self.prompt_logprobs = next_output.prompt_logprobs
        by_index = {output.index: i for i, output in enumerate(self.outputs)}
        for later in next_output.outputs:
            place = by_index.get(later.index)
            if place is None:
                self.outputs.append(later)
            elif aggregate:
                _append(self.outputs[place], later)
            else:
                self.outputs[place] = later


def _append(output: CompletionOutput, later: CompletionOutput) -> None:
    output.text += later.text
    output.token_ids = [*output.token_ids, *later.token_ids]
    if later.logprobs and output.logprobs is None:
        output.logprobs = later.logprobs
    elif later.logprobs:
        output.logprobs.extend(later.logprobs)
    output.cumulative_logprob = later.cumulative_logprob
    output.finish_reason = later.finish_reason
    output.stop_reason = later.stop_reason

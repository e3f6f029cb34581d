# SPDX-License-Identifier: Apache-2.0
"""What `LLM.beam_search` gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.logprobs import SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams


@dataclass
class BeamSearchSequence:
    """A sequence that a beam search ended with.

    tokens: prompt and output, the token that ended it among them; of an encoder-decoder model the
        decoder's.
    logprobs: for each token of the output its own and those of the best candidates beside it, as
        changed by whatever forbids, biases or penalises tokens.
    cum_logprob: the sum of the output's logprobs. score: that, divided as `length_penalty` says.
    text: of the output.
    """

    tokens: list[int]
    logprobs: SampleLogprobs | None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0


@dataclass
class BeamSearchOutput:
    """The sequences of one prompt, best first: as many as there are beams, or fewer where too many
    tokens are forbidden; none if the search failed, which was logged."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def output_of(request: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    """The sequences of a request that has ended."""
    prompt = list(request.prompt_token_ids or ())
    done = [each for each in request.outputs if each.finish_reason in ("stop", "length")]
    return BeamSearchOutput([_sequence(prompt, each, params) for each in done])


def _sequence(
    prompt_token_ids: list[int], output: CompletionOutput, params: BeamSearchParams
) -> BeamSearchSequence:
    score = output.beam_score
    if score is None:  # A single beam: it was not compared with any.
        score = (output.cumulative_logprob or 0.0) / len(output.token_ids) ** params.length_penalty
    return BeamSearchSequence(
        tokens=[*prompt_token_ids, *output.token_ids],
        logprobs=output.logprobs,
        cum_logprob=output.cumulative_logprob or 0.0,
        text=output.text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        score=score,
    )

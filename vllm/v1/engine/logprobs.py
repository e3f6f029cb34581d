# SPDX-License-Identifier: Apache-2.0
"""Logprobs of one request, from the engine core's arrays to what a user gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.logprobs import (
    PromptLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import REPLACEMENT, IncrementalDecoder
from vllm.v1.outputs import LogprobsLists


class TokenTexts:
    """Single tokens as text, remembered: with 20 logprobs a token the same ones come up again and
    again."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text


@dataclass
class LogprobsProcessor:
    """Collects a completion's logprobs. `texts` is None where there is no tokenizer: then
    `decoded_token` is None too."""

    num_logprobs: int | None
    num_prompt_logprobs: int | None
    # False: the request names the tokens whose logprobs it wants, so these are not the likeliest.
    wants_likeliest: bool = True
    texts: TokenTexts | None = None
    decoder: IncrementalDecoder | None = None
    logprobs: SampleLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cumulative_logprob: float | None = None

    @classmethod
    def from_new_request(
        cls, tokenizer: TokenizerLike | None, texts: TokenTexts | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """For a request that starts now."""
        params = request.sampling_params
        wanted = params.num_logprobs
        decoder = None
        if wanted is not None and tokenizer is not None:
            # Its own: unlike the output's text, logprobs name special and stop tokens too.
            decoder = IncrementalDecoder(
                tokenizer, request.prompt_token_ids, skip_special_tokens=False
            )
        return cls(
            num_logprobs=wanted,
            num_prompt_logprobs=params.prompt_logprobs,
            wants_likeliest=params.logprob_token_ids is None,
            texts=texts,
            decoder=decoder,
            logprobs=None if wanted is None else create_sample_logprobs(params.flat_logprobs),
            prompt_logprobs=(
                None
                if params.prompt_logprobs is None
                else create_prompt_logprobs(params.flat_logprobs)
            ),
            cumulative_logprob=None if wanted is None else 0.0,
        )

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Takes in what a step gave."""
        if output.new_logprobs is not None and self.logprobs is not None:
            self._add_sample_logprobs(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None and self.prompt_logprobs is not None:
            self._add_prompt_logprobs(output.new_prompt_logprobs_tensors)

    def _add_sample_logprobs(self, rows: LogprobsLists) -> None:
        for token_ids, values, rank in _positions(rows):
            taken = token_ids[0]
            texts = self._texts_of(token_ids)
            if self.decoder is not None:
                # Parts of a character: nothing but for the last, which has it whole. So the texts,
                # joined, are the output's.
                piece = self.decoder.step(taken)
                if texts[0] is not None and REPLACEMENT in texts[0]:
                    texts[0] = piece
            append_logprobs_for_next_position(
                self.logprobs,
                token_ids,
                values,
                texts,
                rank,
                self.num_logprobs,
                self.wants_likeliest,
            )
            self.cumulative_logprob += values[0]

    def _add_prompt_logprobs(self, rows: LogprobsLists) -> None:
        for token_ids, values, rank in _positions(rows):
            texts = self._texts_of(token_ids)
            append_logprobs_for_next_position(
                self.prompt_logprobs, token_ids, values, texts, rank, self.num_prompt_logprobs
            )

    def _texts_of(self, token_ids: Sequence[int]) -> list[str | None]:
        if self.texts is None:
            return [None] * len(token_ids)
        return [self.texts[token_id] for token_id in token_ids]

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's logprobs, once: for outputs that hold only what is new."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken


def _positions(rows: LogprobsLists) -> Iterator[tuple[list[int], list[float], int]]:
    return zip(
        rows.logprob_token_ids.tolist(), rows.logprobs.tolist(), rows.sampled_token_ranks.tolist()
    )


# SPDX-License-Identifier: Apache-2.0
"""Logprobs as a user gets them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Logprob:
    """One token's logprob at a position; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
# A prompt's first token has nothing before it, so its entry is None.
PromptLogprobs = list[LogprobsOnePosition | None]
SampleLogprobs = list[LogprobsOnePosition]


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Appends a position. `token_ids[0]` is the token that was taken (of rank `rank`), the
    `num_logprobs` after it are the most likely ones in order; -1: all that are given."""
    if num_logprobs == -1:
        num_logprobs = len(logprobs) - 1
    ranks = [rank, *range(1, num_logprobs + 1)]
    entries: LogprobsOnePosition = {}
    for token, value, token_rank, text in zip(token_ids, logprobs, ranks, decoded_tokens):
        entries.setdefault(token, Logprob(value, token_rank, text))
    request_logprobs.append(entries)

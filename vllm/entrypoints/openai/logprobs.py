# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.chat import ChatLogProbs, TokenLogprob, TopLogprob
from vllm.entrypoints.openai.protocol.completion import CompletionLogProbs
from vllm.logprobs import Logprob, LogprobsOnePosition, PromptLogprobs

# JSON has no -inf; OpenAI and upstream say this.
MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """`logprob`, or the least that JSON is told; NaN too, which JSON cannot say either."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition],
    num_logprobs: int,
    text_offset: int = 0,
) -> CompletionLogProbs:
    """The shape of `/v1/completions`: at each position the token taken, and the `num_logprobs`
    likeliest beside it. `text_offset`: characters of the completion before these tokens."""
    # Given to the constructor whole: chunks of a stream say only what was set.
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions):
        taken = position[token_id]
        text = taken.decoded_token or ""
        tokens.append(text)
        values.append(finite(taken.logprob))
        offsets.append(text_offset)
        text_offset += len(text)
        top: dict[str, float] = {}
        # Different tokens may read alike (parts of a character): the likelier one stays.
        for entry in [*_likeliest(position, num_logprobs), taken]:
            top.setdefault(entry.decoded_token or "", finite(entry.logprob))
        tops.append(top)
    return CompletionLogProbs(
        text_offset=offsets, token_logprobs=values, tokens=tokens, top_logprobs=tops
    )


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition], num_logprobs: int
) -> ChatLogProbs:
    """The shape of `/v1/chat/completions`, with the `num_logprobs` likeliest at each position."""
    content = []
    for token_id, position in zip(token_ids, positions):
        likeliest = _likeliest(position, num_logprobs)
        content.append(
            TokenLogprob(
                **_entry(position[token_id]),
                top_logprobs=[TopLogprob(**_entry(entry)) for entry in likeliest],
            )
        )
    return ChatLogProbs(content=content)


def prompt_logprobs(
    positions: PromptLogprobs | None,
) -> list[dict[int, dict[str, Any]] | None] | None:
    """Upstream's shape: for each position token id -> logprob, rank, decoded_token."""
    if positions is None:
        return None
    return [_prompt_position(position) if position else None for position in positions]


def _prompt_position(position: LogprobsOnePosition) -> dict[int, dict[str, Any]]:
    return {
        token_id: {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def _likeliest(position: LogprobsOnePosition, count: int) -> list[Logprob]:
    """The `count` likeliest in order; -1: all that there are."""
    ranked = sorted(position.values(), key=lambda entry: entry.rank or 0)
    return ranked if count == -1 else ranked[:count]


def _entry(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": text,
        "logprob": finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }

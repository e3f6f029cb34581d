# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol.chat import ChatLogProbs, TokenLogprob, TopLogprob
from vllm.entrypoints.openai.protocol.completion import CompletionLogProbs
from vllm.logprobs import Logprob, LogprobsOnePosition, PromptLogprobs

# How a token is told: by its id and what is known of it, if anything is.
TokenName = Callable[[int, Logprob | None], str]
# JSON has no -inf; OpenAI and upstream say this.
MIN_LOGPROB = -9999.0


def text_of(token_id: int, entry: Logprob | None) -> str:
    """The token's text."""
    return (entry.decoded_token if entry else None) or ""


def id_of(token_id: int, entry: Logprob | None) -> str:
    """`token_id:5`: unlike texts, different for different tokens."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """`logprob`, or the least that JSON is told; NaN too, which JSON cannot say either."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition | None],
    num_logprobs: int,
    text_offset: int = 0,
    name: TokenName | None = None,
) -> CompletionLogProbs:
    """The shape of `/v1/completions`: at each position the token taken, and the `num_logprobs`
    likeliest beside it.

    Args:
        positions: None where there is nothing to tell: a prompt's first token.
        text_offset: characters of the completion before these tokens.
        name: how tokens are told; None: by their text.
    """
    # Given to the constructor whole: chunks of a stream say only what was set.
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    name = name or text_of
    for token_id, position in zip(token_ids, positions):
        taken = position[token_id] if position else None
        text = name(token_id, taken)
        tokens.append(text)
        values.append(None if taken is None else finite(taken.logprob))
        offsets.append(text_offset)
        text_offset += len(text)
        if taken is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        # Different tokens may read alike (parts of a character): the likelier one stays.
        for other_id, entry in [*_likeliest(position, num_logprobs), (token_id, taken)]:
            top.setdefault(name(other_id, entry), finite(entry.logprob))
        tops.append(top)
    return CompletionLogProbs(
        text_offset=offsets, token_logprobs=values, tokens=tokens, top_logprobs=tops
    )


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition],
    num_logprobs: int,
    name: TokenName | None = None,
) -> ChatLogProbs:
    """The shape of `/v1/chat/completions`, with the `num_logprobs` likeliest at each position."""
    content = []
    for token_id, position in zip(token_ids, positions):
        likeliest = _likeliest(position, num_logprobs)
        content.append(
            TokenLogprob(
                **_entry(token_id, position[token_id], name),
                top_logprobs=[TopLogprob(**_entry(*item, name)) for item in likeliest],
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


def _likeliest(position: LogprobsOnePosition, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest in order, tokens of no known rank as they were asked for; -1: all that
    there are."""
    # Sorting keeps the order of equals; the token that was taken comes first in `position`.
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return ranked if count == -1 else ranked[:count]


def _entry(token_id: int, entry: Logprob, name: TokenName | None) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": text if name is None else name(token_id, entry),
        "logprob": finite(entry.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }

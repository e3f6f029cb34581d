# SPDX-License-Identifier: Apache-2.0
"""Logprobs as a user gets them: a dict a position, or all positions in a few flat lists."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import overload


@dataclass
class Logprob:
    """One token's logprob at a position; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


@dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """The same as a list of dicts, without an object for each token: a few lists for all positions.

    Position i has the entries `start_indices[i]` to `end_indices[i]` (exclusive) of `token_ids`,
    `logprobs`, `ranks` and `decoded_tokens`; none, and it is None as a dict. Positions can be
    added and read, not changed.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, logprobs_one_position: LogprobsOnePosition | None) -> None:
        """Adds a position; None, or a dict without entries: one that has none."""
        entries = logprobs_one_position or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Adds a position from parallel lists."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, logprobs_multi_positions: Iterable[LogprobsOnePosition | None]) -> None:
        """Adds positions; a `FlatLogprobs` without making dicts of it."""
        if not isinstance(logprobs_multi_positions, FlatLogprobs):
            for position in logprobs_multi_positions:
                self.append(position)
            return
        other = logprobs_multi_positions
        for start, end in list(zip(other.start_indices, other.end_indices)):
            self.append_fast(
                other.token_ids[start:end], other.logprobs[start:end],
                other.ranks[start:end], other.decoded_tokens[start:end],
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, position: int) -> LogprobsOnePosition | None: ...

    @overload
    def __getitem__(self, s: slice, /) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        """A position as a dict, or some positions as another `FlatLogprobs`.

        Raises:
            IndexError: there is no such position.
        """
        if isinstance(index, slice):
            chosen = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index]):
                chosen.append_fast(
                    self.token_ids[start:end], self.logprobs[start:end],
                    self.ranks[start:end], self.decoded_tokens[start:end],
                )  # fmt: skip
            return chosen
        start, end = self.start_indices[index], self.end_indices[index]
        if start == end:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(start, end)
        }

    def __setitem__(self, index: int | slice, value: object) -> None:
        raise TypeError("positions of FlatLogprobs cannot be replaced")

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("positions of FlatLogprobs cannot be taken out")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        """Not possible: `append` and `extend` add at the end.

        Raises:
            TypeError: always.
        """
        raise TypeError("positions of FlatLogprobs are added at the end only")


# A prompt's first token has nothing before it, so its entry is None.
PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """For a new request's prompt: its first position is there, without entries."""
    logprobs: PromptLogprobs = FlatLogprobs() if flat_logprobs else []
    logprobs.append(None)
    return logprobs


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """For a new request's output: nothing yet."""
    return FlatLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
    ranks_are_known: bool = True,
) -> None:
    """Appends a position. `token_ids[0]` is the token that was taken (of rank `rank`), the
    `num_logprobs` after it are the most likely ones in order; -1: all that are given. Without
    `ranks_are_known` they are others, whose ranks stay None."""
    if num_logprobs == -1:
        num_logprobs = len(logprobs) - 1
    others = range(1, num_logprobs + 1) if ranks_are_known else [None] * num_logprobs
    rows = zip(token_ids, logprobs, (rank, *others), decoded_tokens)
    # The token that was taken may be among the others; it is told once.
    entries = {row[0]: row for row in reversed(list(rows))}
    chosen = [entries.pop(token) for token in token_ids[: num_logprobs + 1] if token in entries]
    if isinstance(request_logprobs, FlatLogprobs):
        ids, values, ranks, texts = zip(*chosen)
        request_logprobs.append_fast(ids, values, ranks, texts)
    else:
        request_logprobs.append({row[0]: Logprob(*row[1:]) for row in chosen})

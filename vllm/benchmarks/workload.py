# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks of an engine: token ids in, a fixed number of token ids out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, each to be continued by exactly `output_len` tokens, greedily. Of an
    encoder-decoder model they are the encoder's inputs."""

    prompts: tuple[tuple[int, ...], ...]
    output_len: int

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return self.num_prompts * self.output_len


def random_workload(
    num_prompts: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
    excluded_ids: Collection[int] = (),
    range_ratio: float = 0.0,
) -> Workload:
    """Prompts of `input_len` ids drawn evenly from the vocabulary without `excluded_ids`.

    With a `range_ratio` each has a length drawn evenly from input_len * (1 - range_ratio) to
    input_len * (1 + range_ratio).

    The first n prompts of a seed are the same for every `num_prompts`.

    Raises:
        ValueError: a count below 1, or no id left to draw.
    """
    counts = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(excluded_ids, dtype=np.int64))
    if ids.size == 0:
        raise ValueError(f"all {vocab_size} ids of the vocabulary are excluded")
    rng = np.random.default_rng(seed)
    shortest, longest = length_range(input_len, range_ratio)

    def length() -> int:
        return shortest if shortest == longest else int(rng.integers(shortest, longest + 1))

    drawn = (rng.choice(ids, size=length()) for _ in range(num_prompts))
    return Workload(tuple(tuple(prompt.tolist()) for prompt in drawn), output_len)


def length_range(length: int, range_ratio: float) -> tuple[int, int]:
    """Shortest and longest of lengths around one, both at least 1."""
    shortest = max(1, int(length * (1 - range_ratio)))
    return shortest, max(shortest, int(length * (1 + range_ratio)))

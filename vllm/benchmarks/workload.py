# SPDX-License-Identifier: Apache-2.0
"""What a benchmark asks of an engine: token ids in, a fixed number of token ids out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Prompts of token ids, each to be continued by exactly `output_len` tokens, greedily."""

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
) -> Workload:
    """Prompts of `input_len` ids drawn evenly from the vocabulary without `excluded_ids`.

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
    drawn = (rng.choice(ids, size=input_len) for _ in range(num_prompts))
    return Workload(tuple(tuple(prompt.tolist()) for prompt in drawn), output_len)

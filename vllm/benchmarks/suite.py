# SPDX-License-Identifier: Apache-2.0
"""The workloads of `vllm bench compare`, by name, and the figures that each is judged by."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from vllm.benchmarks.workload import Workload

S1_TOKENS, BATCH_LENGTHS, BATCH_OUTPUT = 128, (32, 256), 128
PREFIX_REQUESTS, PREFIX_SHARED, PREFIX_OWN, PREFIX_OUTPUT = 32, 512, 16, 64


@dataclass(frozen=True)
class Task:
    """A workload. `first`: the same prompts for one token, run beside it, so that the time to the
    first token and the rate of the others are told apart; None: the rate of the whole counts."""

    name: str
    workload: Workload
    first: Workload | None = None

    @property
    def runs(self) -> tuple[Workload, ...]:
        return (self.workload,) if self.first is None else (self.workload, self.first)

    @property
    def unit(self) -> str:
        return "output tokens/s" if self.first is None else "decode tokens/s"

    def rate(self, seconds: float, first_seconds: float | None) -> float:
        """Tokens a second of a round; where the first token is told apart, of the others."""
        if first_seconds is None:
            return self.workload.num_output_tokens / seconds
        others = self.workload.num_prompts * (self.workload.output_len - 1)
        return others / max(seconds - first_seconds, 1e-9)

    @property
    def weight_reads(self) -> int:
        """Decoding steps that `rate` counts, each of which reads all weights at least once."""
        return self.workload.output_len - (self.first is not None)


def make_task(name: str, vocab_size: int, seed: int, excluded_ids: Collection[int] = ()) -> Task:
    """The workload of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in TASKS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(TASKS)}")
    ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(excluded_ids, dtype=np.int64))
    return TASKS[name](ids, np.random.default_rng(seed))


def _single(ids: np.ndarray, rng: np.random.Generator) -> Task:
    prompts = _prompts(ids, rng, [S1_TOKENS])
    return Task("s1", Workload(prompts, S1_TOKENS), Workload(prompts, 1))


def _batch(count: int) -> Callable[[np.ndarray, np.random.Generator], Task]:
    def make(ids: np.ndarray, rng: np.random.Generator) -> Task:
        low, high = BATCH_LENGTHS
        lengths = rng.integers(low, high + 1, size=count).tolist()
        return Task(f"b{count}", Workload(_prompts(ids, rng, lengths), BATCH_OUTPUT))

    return make


def _shared_prefix(ids: np.ndarray, rng: np.random.Generator) -> Task:
    (shared,) = _prompts(ids, rng, [PREFIX_SHARED])
    own = _prompts(ids, rng, [PREFIX_OWN] * PREFIX_REQUESTS)
    return Task("prefix", Workload(tuple(shared + tail for tail in own), PREFIX_OUTPUT))


def _prompts(
    ids: np.ndarray, rng: np.random.Generator, lengths: list[int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.choice(ids, size=length).tolist()) for length in lengths)


TASKS: dict[str, Callable[[np.ndarray, np.random.Generator], Task]] = {
    "s1": _single,
    "b8": _batch(8),
    "b32": _batch(32),
    "b64": _batch(64),
    "prefix": _shared_prefix,
}

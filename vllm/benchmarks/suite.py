# SPDX-License-Identifier: Apache-2.0
"""The workloads of `vllm bench compare`, by name, and the figures that each is judged by."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from vllm.benchmarks.workload import Workload

S1_TOKENS, BATCH_LENGTHS, BATCH_OUTPUT = 128, (32, 256), 128
PREFIX_REQUESTS, PREFIX_SHARED, PREFIX_OWN, PREFIX_OUTPUT = 32, 512, 16, 64
BART_LENGTHS, BART_OUTPUT = (128, 512), 64


@dataclass(frozen=True)
class EngineSet:
    """Engines that are measured with each other. `precision`: of the weights, ours and the peers';
    None: what the run was asked for. `is_encoder_decoder`: the model is the random BART."""

    precision: str | None = None
    is_encoder_decoder: bool = False


LANGUAGE, BART = EngineSet(), EngineSet(is_encoder_decoder=True)


@dataclass(frozen=True)
class Task:
    """A workload. `first`: the same prompts for one token, run beside it, so that the time to the
    first token and the rate of the others are told apart; None: the rate of the whole counts."""

    name: str
    workload: Workload
    first: Workload | None = None
    engine_set: EngineSet = LANGUAGE

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


def make_task(name: str, vocab_size: int, seed: int, excluded_ids: Collection[int] = ()) -> Task:
    """The workload of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in TASKS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(TASKS)}")
    ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(excluded_ids, dtype=np.int64))
    return TASKS[name](ids, np.random.default_rng(seed))


Maker = Callable[[np.ndarray, np.random.Generator], Task]


def _single(name: str, precision: str | None = None) -> Maker:
    def make(ids: np.ndarray, rng: np.random.Generator) -> Task:
        prompts = _prompts(ids, rng, [S1_TOKENS])
        whole, first = Workload(prompts, S1_TOKENS), Workload(prompts, 1)
        return Task(name, whole, first, EngineSet(precision))

    return make


def _batch(count: int) -> Maker:
    def make(ids: np.ndarray, rng: np.random.Generator) -> Task:
        prompts = _prompts(ids, rng, _lengths(rng, BATCH_LENGTHS, count))
        return Task(f"b{count}", Workload(prompts, BATCH_OUTPUT))

    return make


def _bart(count: int) -> Maker:
    def make(ids: np.ndarray, rng: np.random.Generator) -> Task:
        prompts = _prompts(ids, rng, _lengths(rng, BART_LENGTHS, count))
        return Task(f"bart{count}", Workload(prompts, BART_OUTPUT), engine_set=BART)

    return make


def _shared_prefix(ids: np.ndarray, rng: np.random.Generator) -> Task:
    (shared,) = _prompts(ids, rng, [PREFIX_SHARED])
    own = _prompts(ids, rng, [PREFIX_OWN] * PREFIX_REQUESTS)
    return Task("prefix", Workload(tuple(shared + tail for tail in own), PREFIX_OUTPUT))


def _lengths(rng: np.random.Generator, limits: tuple[int, int], count: int) -> list[int]:
    low, high = limits
    return rng.integers(low, high + 1, size=count).tolist()


def _prompts(
    ids: np.ndarray, rng: np.random.Generator, lengths: list[int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.choice(ids, size=length).tolist()) for length in lengths)


TASKS: dict[str, Maker] = {
    "s1": _single("s1"),
    "b8": _batch(8),
    "b32": _batch(32),
    "b64": _batch(64),
    "prefix": _shared_prefix,
    "s1-int8": _single("s1-int8", "int8"),
    "s1-int4": _single("s1-int4", "int4"),
    "bart1": _bart(1),
    "bart8": _bart(8),
    "bart32": _bart(32),
}
# What is measured of our engine otherwise than by a workload's rate; see measures/.
MEASURES = ("http", "growth", "ready")
# About what each takes beside the others, with all peers and few rounds: shares of a time limit.
_COSTS = {
    "s1": 2, "b8": 4, "b32": 8, "b64": 16, "prefix": 10, "s1-int8": 2, "s1-int4": 2,
    "bart1": 2, "bart8": 3, "bart32": 6, "http": 4, "growth": 4, "ready": 8,
}  # fmt: skip
_SHORT_FOR = {"bart": ("bart1", "bart8", "bart32")}
WORKLOAD_NAMES = (*TASKS, *_SHORT_FOR, *MEASURES)


def share_of_time(name: str, left: Collection[str]) -> float:
    """How much of the time that is left a workload or measure may take; `left`: it and the others
    that are to come."""
    return _COSTS[name] / sum(_COSTS[other] for other in left)


def expand_names(names: Collection[str] | None) -> tuple[list[str], list[str]]:
    """Tasks and measures of these names, each once, in the order of the tables; None: all."""
    if names is None:
        return list(TASKS), list(MEASURES)
    wanted = {long for name in names for long in _SHORT_FOR.get(name, (name,))}
    return [name for name in TASKS if name in wanted], [m for m in MEASURES if m in wanted]

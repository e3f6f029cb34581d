# SPDX-License-Identifier: Apache-2.0
"""Runs the tasks of a suite on several engines, round by round, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.compare import checked_run
from vllm.benchmarks.engine import BenchEngine, EngineInfo
from vllm.benchmarks.process import EngineFailed, reason
from vllm.benchmarks.suite import Task
from vllm.logger import init_logger

logger = init_logger(__name__)


class SuiteEngine(BenchEngine, Protocol):
    """An engine whose process tells its memory."""

    def peak_memory_bytes(self) -> int: ...


@dataclass(frozen=True)
class TaskResult:
    """An engine's rounds of a task, or why there are none. Seconds; `first_seconds` is empty where
    the task does not tell the first token apart. `first_tokens`: what each prompt is continued
    with."""

    engine: str
    info: EngineInfo | None
    seconds: tuple[float, ...] = ()
    first_seconds: tuple[float, ...] = ()
    peak_memory_bytes: int = 0
    first_tokens: tuple[int, ...] = ()
    failure: str = ""

    def median_rate(self, task: Task) -> float:
        """0 where it failed."""
        firsts: Sequence[float | None] = self.first_seconds or [None] * len(self.seconds)
        rates = [task.rate(s, f) for s, f in zip(self.seconds, firsts, strict=True)]
        return statistics.median(rates) if rates else 0.0

    @property
    def median_first_seconds(self) -> float | None:
        return statistics.median(self.first_seconds) if self.first_seconds else None


@dataclass(frozen=True)
class TaskTable:
    """All engines' results of one task, ours first, and the machine's bounds of each round."""

    task: Task
    results: tuple[TaskResult, ...]
    bounds: tuple[Bounds, ...]


class LastBounds:
    """The machine's bounds, as a probe measures them. Once it fails its last ones stand in: engines
    lose no rounds for it.

    Raises:
        EngineFailed: when it is made, if the probe cannot measure at all.
    """

    def __init__(self, measure: Callable[[], Bounds]) -> None:
        self._measure = measure
        self._last = measure()

    def __call__(self) -> Bounds:
        try:
            self._last = self._measure()
        except EngineFailed as error:
            logger.warning("the bounds are those of an earlier round: %s", reason(error))
        return self._last


@dataclass
class _State:
    """How far an engine is in a task."""

    engine: SuiteEngine
    spent_s: float = 0.0
    rounds: list[list[float]] = field(default_factory=list)
    first_tokens: tuple[int, ...] = ()
    failure: str = ""

    def attempt(self, work: Callable[[], None]) -> None:
        """Does it and counts its time; an engine that fails takes no further part."""
        began = time.perf_counter()
        try:
            work()
        except Exception as error:
            self.failure = reason(error)
        self.spent_s += time.perf_counter() - began

    def one_round(self, task: Task) -> None:
        done = [checked_run(self.engine, workload) for workload in task.runs]
        self.rounds.append([run.seconds for run in done])
        self.first_tokens = tuple(ids[0] for ids in done[0].token_ids)

    def takes_part(self, share_s: float | None) -> bool:
        """Whether it has a round to do: its first, or one that its share of the time allows."""
        if self.failure:
            return False
        return not self.rounds or share_s is None or self.spent_s < share_s

    def result(self) -> TaskResult:
        name = self.engine.name
        try:
            if not self.failure:
                info, memory = self.engine.info(), self.engine.peak_memory_bytes()
        except Exception as error:
            self.failure = reason(error)
        if self.failure:
            return TaskResult(name, None, failure=self.failure)
        whole = tuple(seconds[0] for seconds in self.rounds)
        firsts = tuple(seconds[1] for seconds in self.rounds if len(seconds) > 1)
        return TaskResult(name, info, whole, firsts, memory, self.first_tokens)


def run_task(
    engines: Sequence[SuiteEngine],
    task: Task,
    num_iters: int,
    measure_bounds: Callable[[], Bounds],
    on_step: Callable[[str], None] = lambda what: None,
    limit_s: float | None = None,
) -> TaskTable:
    """`num_iters` rounds of every engine; who begins moves on by one each round. An engine that
    fails is left out of the rest of the task; the others go on. `measure_bounds`: such as
    `LastBounds`; what it raises ends the task.

    With a limit every engine has the same share of it: one that has used up its own, warm-up
    included, sits out, after one round at the least."""
    share_s = None if limit_s is None else limit_s / len(engines)
    states = [_State(engine) for engine in engines]
    for state in states:
        on_step(f"{task.name}: {state.engine.name}: warm-up")
        state.attempt(lambda state=state: state.engine.prepare(task.workload))
    bounds = []
    for number in range(num_iters):
        if number and not any(state.takes_part(share_s) for state in states):
            break
        bounds.append(measure_bounds())
        start = number % len(engines)
        for state in (*states[start:], *states[:start]):
            if state.takes_part(share_s):
                on_step(f"{task.name}: {state.engine.name}: round {number + 1} of {num_iters}")
                state.attempt(lambda state=state: state.one_round(task))
    return TaskTable(task, tuple(state.result() for state in states), tuple(bounds))

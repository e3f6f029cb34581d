# SPDX-License-Identifier: Apache-2.0
"""Runs the tasks of a suite on several engines, round by round, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.compare import checked_run
from vllm.benchmarks.engine import BenchEngine, EngineInfo
from vllm.benchmarks.process import EngineFailed
from vllm.benchmarks.suite import Task


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
    """All engines' results of one task, and the machine's bounds of each round."""

    task: Task
    results: tuple[TaskResult, ...]
    bounds: tuple[Bounds, ...]


def run_task(
    engines: Sequence[SuiteEngine],
    task: Task,
    num_iters: int,
    measure_bounds: Callable[[], Bounds],
    on_step: Callable[[str], None] = lambda what: None,
) -> TaskTable:
    """`num_iters` rounds of every engine; who begins moves on by one each round. An engine that
    fails is left out of the rest of the task; the others go on."""
    failures: dict[str, str] = {}
    runs: dict[str, list[list[float]]] = {engine.name: [] for engine in engines}
    tokens: dict[str, tuple[int, ...]] = {}

    def attempt(engine: SuiteEngine, work: Callable[[], None]) -> None:
        if engine.name in failures:
            return
        try:
            work()
        except (EngineFailed, ValueError) as error:
            failures[engine.name] = " ".join(str(error).split())

    def one_round(engine: SuiteEngine) -> None:
        done = [checked_run(engine, workload) for workload in task.runs]
        runs[engine.name].append([run.seconds for run in done])
        tokens[engine.name] = tuple(ids[0] for ids in done[0].token_ids)

    for engine in engines:
        on_step(f"{task.name}: {engine.name}: warm-up")
        attempt(engine, lambda engine=engine: engine.prepare(task.workload))
    bounds = []
    for number in range(num_iters):
        bounds.append(measure_bounds())
        start = number % len(engines)
        for engine in (*engines[start:], *engines[:start]):
            on_step(f"{task.name}: {engine.name}: round {number + 1} of {num_iters}")
            attempt(engine, lambda engine=engine: one_round(engine))
    results = tuple(_result(engine, runs, tokens, failures) for engine in engines)
    return TaskTable(task, results, tuple(bounds))


def _result(engine: SuiteEngine, runs, tokens, failures: dict[str, str]) -> TaskResult:
    if engine.name in failures:
        return TaskResult(engine.name, None, failure=failures[engine.name])
    rounds = runs[engine.name]
    return TaskResult(
        engine.name,
        engine.info(),
        tuple(seconds[0] for seconds in rounds),
        tuple(seconds[1] for seconds in rounds if len(seconds) > 1),
        engine.peak_memory_bytes(),
        tokens[engine.name],
    )

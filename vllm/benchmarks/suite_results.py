# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench compare` found, as it is kept in a JSON file and printed from."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import msgspec

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.engine import EngineInfo
from vllm.platforms.cpu_threads import plan_threads


@dataclass(frozen=True)
class EngineResult:
    """An engine's rounds of a workload, or why there are none (`failure`). `first_seconds`: of the
    runs for one token; empty where the workload has none. Rates are medians, 0 where it failed."""

    engine: str
    info: EngineInfo | None
    tokens_per_second: float = 0.0
    ours_over_it: float | None = None
    first_token_seconds: float | None = None
    seconds: tuple[float, ...] = ()
    first_seconds: tuple[float, ...] = ()
    peak_memory_bytes: int = 0
    same_first_tokens_as_ours: int = 0
    failure: str = ""


@dataclass(frozen=True)
class TaskReport:
    """A workload's table; ours is the first engine. `bounds`: medians over the rounds.
    `bound_tokens_per_second`: what they allow; None: not reckoned for such a model."""

    workload: str
    description: str
    num_requests: int
    output_len: int
    unit: str
    engines: tuple[EngineResult, ...]
    bounds: Bounds
    num_rounds: int
    bound_tokens_per_second: float | None = None
    weight_bytes: int | None = None

    def result(self, engine: str) -> EngineResult | None:
        """That engine's, if it was measured."""
        return next((r for r in self.engines if r.engine == engine and not r.failure), None)


@dataclass(frozen=True)
class Measure:
    """A figure of our engine and what it is held against. `ratio`: the figure over that."""

    name: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class MeasureReport:
    """What came of one of `suite.MEASURES`, or why nothing did."""

    workload: str
    measures: tuple[Measure, ...] = ()
    failure: str = ""

    def measure(self, name: str) -> Measure | None:
        return next((m for m in self.measures if m.name == name), None)


@dataclass(frozen=True)
class Machine:
    """Where and when. `processor`: the model's name where the system tells it."""

    processor: str
    num_threads: int
    date: str

    @classmethod
    def this(cls) -> Machine:
        return cls(_processor(), plan_threads().num_threads, date.today().isoformat())


@dataclass(frozen=True)
class SuiteReport:
    """A run, whole or as far as it came. `ready_seconds`: until each engine's process could be
    asked, model loaded and, where an engine compiles, compiled. `left_out`: peers and why."""

    machine: Machine
    model: str
    precision: str
    tasks: tuple[TaskReport, ...] = ()
    measures: tuple[MeasureReport, ...] = ()
    ready_seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    benchmark: str = "compare"

    def task(self, name: str) -> TaskReport | None:
        return next((task for task in self.tasks if task.workload == name), None)

    def measured(self, name: str) -> MeasureReport | None:
        return next((report for report in self.measures if report.workload == name), None)


def to_json(report: SuiteReport) -> str:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def from_json(text: str) -> SuiteReport:
    """The report that `to_json` wrote.

    Raises:
        ValueError: the text is something else.
    """
    try:
        return msgspec.json.decode(text, type=SuiteReport)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no results of `vllm bench compare`: {error}") from None


def read_report(path: str) -> SuiteReport:
    """The report in a file.

    Raises:
        ValueError: there is none.
    """
    try:
        return from_json(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

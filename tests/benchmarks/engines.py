# SPDX-License-Identifier: Apache-2.0
"""Engines that answer at once, for tests of what measures them; importable by a new process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.workload import Workload


@dataclass
class CannedEngine:
    """Tells the given seconds, round by round, and continues each prompt with `token`. `takes_s`:
    for how long it really sleeps."""

    name: str
    seconds: list[float]
    token: int = 7
    output_len: int | None = None
    calls: list[str] = field(default_factory=list)
    takes_s: float = 0.0

    def prepare(self, workload: Workload) -> None:
        self.calls.append(f"{self.name} prepare")

    def run(self, workload: Workload) -> Run:
        self.calls.append(f"{self.name} run")
        time.sleep(self.takes_s)
        length = workload.output_len if self.output_len is None else self.output_len
        return Run(self.seconds.pop(0), tuple((self.token,) * length for _ in workload.prompts))

    def peak_memory_bytes(self) -> int:
        return 1 << 20

    def info(self) -> EngineInfo:
        threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        return EngineInfo(self.name, "1", "float32", threads, os.environ.get("GOMP_SPINCOUNT", ""))


@dataclass(frozen=True)
class CannedSpec:
    """Builds a `CannedEngine`, or fails in the way that `fault` names."""

    name: str = "canned"
    fault: str = ""
    is_peer: bool = False

    def build(self) -> CannedEngine:
        if self.fault == "raises in build":
            raise ValueError("no such model")
        if self.fault == "dies in build":
            os._exit(11)
        if self.fault == "dies in run":
            return DyingEngine(self.name, [])
        if self.fault == "hangs in run":
            return CannedEngine(self.name, [1.0], takes_s=60.0)
        return CannedEngine(self.name, [] if self.fault == "raises in run" else [1.0, 2.0, 3.0])


class DyingEngine(CannedEngine):
    def run(self, workload: Workload) -> Run:
        os._exit(9)


@dataclass(frozen=True)
class CannedBoundsSpec:
    """Builds a probe that measures `times` times and then has its process end."""

    times: int
    name: str = "bounds"
    is_peer: bool = False

    def build(self) -> CannedBounds:
        return CannedBounds(self.times)


@dataclass
class CannedBounds:
    times: int

    def measure(self) -> Bounds:
        if not self.times:
            os._exit(7)
        self.times -= 1
        return Bounds(50e9, ((8, 2e11),))

# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench compare` measures of our engine besides a workload's rate.

Each module has `run(plan)`, which returns the figures (`Measure`); `plan` is `MeasurePlan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm.benchmarks.suite_results import Measure
from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class MeasurePlan:
    """What a measure runs on. `engine_args`: model and dtype resolved; `num_iters`: rounds, medians
    count; `timeout_s`: longest wait for an answer; `upstream_python`: as `PeerOptions`'s;
    `ends_at`: when no further round begins, by `time.perf_counter`."""

    engine_args: EngineArgs
    num_iters: int
    vocab_size: int
    excluded_ids: tuple[int, ...]
    timeout_s: float
    on_step: Callable[[str], None]
    upstream_python: str | None = None
    ends_at: float | None = None

    @property
    def seed(self) -> int:
        return self.engine_args.seed

    def rounds(self, most: int | None = None) -> Iterator[str]:
        """`1 of 5` and so on, `most` at most, until the time is up; one at the least."""
        wanted = self.num_iters if most is None else min(self.num_iters, most)
        for i in range(wanted):
            if i and self.ends_at is not None and time.perf_counter() >= self.ends_at:
                return
            yield f"{i + 1} of {wanted}"


def median_of(count: int, what: str) -> str:
    """`median of 3 rounds`; of one there is none."""
    return f"one {what}" if count == 1 else f"median of {count} {what}s"


def run_measure(name: str, plan: MeasurePlan) -> tuple[Measure, ...]:
    """The figures of the measure of that name.

    Raises:
        EngineFailed, ValueError: an engine or a server failed. Libraries' own errors come through.
    """
    from vllm.benchmarks.measures import growth, http, ready

    return {"http": http.run, "growth": growth.run, "ready": ready.run}[name](plan)

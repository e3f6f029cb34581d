# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench compare` measures of our engine besides a workload's rate.

Each module has `run(plan)`, which returns the figures (`Measure`); `plan` is `MeasurePlan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.benchmarks.suite_results import Measure
from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class MeasurePlan:
    """What a measure runs on. `engine_args`: model and dtype resolved; `num_iters`: rounds, medians
    count; `timeout_s`: longest wait for an answer; `upstream_python`: as `PeerOptions`'s."""

    engine_args: EngineArgs
    num_iters: int
    vocab_size: int
    excluded_ids: tuple[int, ...]
    timeout_s: float
    on_step: Callable[[str], None]
    upstream_python: str | None = None

    @property
    def seed(self) -> int:
        return self.engine_args.seed


def run_measure(name: str, plan: MeasurePlan) -> tuple[Measure, ...]:
    """The figures of the measure of that name.

    Raises:
        EngineFailed, ValueError: an engine or a server failed.
    """
    from vllm.benchmarks.measures import growth, http, ready

    return {"http": http.run, "growth": growth.run, "ready": ready.run}[name](plan)

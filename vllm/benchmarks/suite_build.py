# SPDX-License-Identifier: Apache-2.0
"""From rounds to figures: a task's table as it is reported."""

from __future__ import annotations

import statistics

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.model_size import ModelSize, bound_seconds
from vllm.benchmarks.report import workload_line
from vllm.benchmarks.suite import Task
from vllm.benchmarks.suite_results import EngineResult, TaskReport
from vllm.benchmarks.suite_run import TaskResult, TaskTable


def median_bounds(bounds: tuple[Bounds, ...]) -> Bounds:
    """The median of each figure over the rounds."""
    products = zip(*(item.gemm_flops_per_s for item in bounds), strict=True)
    return Bounds(
        statistics.median(item.read_bytes_per_s for item in bounds),
        tuple((same[0][0], statistics.median(rate for _, rate in same)) for same in products),
    )


def bound_rate(task: Task, bounds: Bounds, size: ModelSize) -> float:
    """Tokens a second that the machine allows; of the tokens that the task's rate counts."""
    first = None if task.first is None else bound_seconds(task.first, size, bounds)
    return task.rate(bound_seconds(task.workload, size, bounds), first)


def task_report(table: TaskTable, size: ModelSize | None) -> TaskReport:
    """The figures of a table. `size`: of our model; None: no bound is reckoned."""
    task, bounds = table.task, median_bounds(table.bounds)
    return TaskReport(
        workload=task.name,
        description=workload_line(task.workload),
        num_requests=task.workload.num_prompts,
        output_len=task.workload.output_len,
        unit=task.unit,
        engines=tuple(_engine_result(result, table) for result in table.results),
        bounds=bounds,
        num_rounds=len(table.bounds),
        bound_tokens_per_second=None if size is None else bound_rate(task, bounds, size),
        weight_bytes=None if size is None else size.weight_bytes,
    )


def _engine_result(result: TaskResult, table: TaskTable) -> EngineResult:
    if result.info is None:
        return EngineResult(result.engine, None, failure=result.failure)
    ours = table.results[0]
    rate, own_rate = result.median_rate(table.task), ours.median_rate(table.task)
    same = (a == b for a, b in zip(result.first_tokens, ours.first_tokens))
    return EngineResult(
        engine=result.engine,
        info=result.info,
        tokens_per_second=rate,
        ours_over_it=own_rate / rate if own_rate else None,
        first_token_seconds=result.median_first_seconds,
        seconds=result.seconds,
        first_seconds=result.first_seconds,
        peak_memory_bytes=result.peak_memory_bytes,
        same_first_tokens_as_ours=sum(same),
    )

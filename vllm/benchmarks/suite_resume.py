# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench compare --resume` keeps of a report, and how later figures are put into it."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from vllm.benchmarks.bounds import BoundsSpec
from vllm.benchmarks.suite_results import MeasureReport, SuiteReport, TaskReport

_Entry = TypeVar("_Entry", TaskReport, MeasureReport)


def check_same_run(before: SuiteReport, now: SuiteReport) -> None:
    """`now`: the empty report of the run that begins.

    Raises:
        ValueError: the figures of the two would not belong under one heading.
    """
    pairs = {
        "model": (before.model, now.model),
        "precision": (before.precision, now.precision),
        "processor": (before.machine.processor, now.machine.processor),
        "number of threads": (before.machine.num_threads, now.machine.num_threads),
    }
    differing = [f"{what} {old}, now {new}" for what, (old, new) in pairs.items() if old != new]
    if differing:
        raise ValueError(
            f"--resume: the results in the file are of {'; '.join(differing)}: take the same, or "
            "another file for --output-json"
        )


def has_task(report: SuiteReport, name: str) -> bool:
    """Whether the workload is done; one in which an engine failed is to be run again."""
    task = report.task(name)
    return task is not None and not any(result.failure for result in task.engines)


def has_measure(report: SuiteReport, name: str) -> bool:
    """Whether the measure is done; one that failed is to be taken again."""
    measured = report.measured(name)
    return measured is not None and not measured.failure


def with_task(report: SuiteReport, task: TaskReport, suffix: str) -> SuiteReport:
    """The report with that table, in place of an older one of the workload. What has figures now is
    no longer left out; `suffix`: of the task's engines in `left_out`."""
    engines = (result.engine for result in task.engines if not result.failure)
    there = {task.workload, BoundsSpec.name, *engines}
    labels = {f"{name}{suffix}" for name in there}
    left_out = {label: why for label, why in report.left_out.items() if label not in labels}
    return dataclasses.replace(report, tasks=_put(report.tasks, task), left_out=left_out)


def with_measure(report: SuiteReport, measured: MeasureReport) -> SuiteReport:
    """The report with that measure, in place of an older one of its name."""
    return dataclasses.replace(report, measures=_put(report.measures, measured))


def _put(entries: tuple[_Entry, ...], new: _Entry) -> tuple[_Entry, ...]:
    names = [entry.workload for entry in entries]
    if new.workload not in names:
        return (*entries, new)
    return tuple(new if entry.workload == new.workload else entry for entry in entries)

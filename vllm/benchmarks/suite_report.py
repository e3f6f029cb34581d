# SPDX-License-Identifier: Apache-2.0
"""The suite's report as text, in lines of at most 100 characters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from vllm.benchmarks.engine import EngineInfo
from vllm.benchmarks.suite_goals import Goal, goals
from vllm.benchmarks.suite_results import (
    EngineResult,
    Measure,
    MeasureReport,
    SuiteReport,
    TaskReport,
)

WIDTH = 100


def report_text(report: SuiteReport) -> str:
    """The tables, the measures, the goals, and what the engines are."""
    machine = report.machine
    parts = [f"{machine.processor}, {machine.num_threads} threads, {machine.date}; {report.model}"]
    parts += [task_text(task) for task in report.tasks]
    parts += [measure_text(measured) for measured in report.measures]
    reached = goals(report)
    if reached:
        lines = (line for goal in reached for line in _wrapped(goal_line(goal), "      "))
        parts.append("\n".join(["goals", *lines]))
    notes = [line for note in engine_notes(report) for line in _wrapped(f"  {note}", "      ")]
    if notes:
        parts.append("\n".join(["engines", *notes]))
    return "\n\n".join(parts)


def task_text(task: TaskReport) -> str:
    """A task's lines: the workload, an engine a line, ours first, the bounds."""
    lines = [
        f"{task.workload}: {task.description}; greedy",
        f"  {'engine':<32} {task.unit:>15} {'ours / it':>10} {'first token':>12} {'memory':>8} "
        f"{'rounds':>7}",
    ]
    for result in task.engines:
        lines += _wrapped(_engine_line(result), "      ")
    return "\n".join([*lines, *_wrapped(_bound_line(task), "    ")])


def engine_name(result: EngineResult) -> str:
    """Name and version; the name alone where it failed."""
    return result.engine if result.info is None else f"{result.info.name} {result.info.version}"


def _engine_line(result: EngineResult) -> str:
    if result.info is None:
        return f"  {result.engine:<32} failed: {result.failure}"
    ratio = "" if result.ours_over_it is None else f"{result.ours_over_it:.2f}"
    first = result.first_token_seconds
    first_text = "" if first is None else f"{first * 1e3:.0f} ms"
    memory = f"{result.peak_memory_bytes / 1e6:.0f} MB"
    return (
        f"  {engine_name(result)[:32]:<32} {result.tokens_per_second:15.1f} {ratio:>10} "
        f"{first_text:>12} {memory:>8} {len(result.seconds):>7}"
    )


def _bound_line(task: TaskReport) -> str:
    bounds = task.bounds
    gemm = ", ".join(f"{rate / 1e9:.0f} at {rows} rows" for rows, rate in bounds.gemm_flops_per_s)
    read = f"memory read {bounds.read_bytes_per_s / 1e9:.1f} GB/s"
    machine = f"{read}, bfloat16 products in GFLOP/s: {gemm}"
    if task.bound_tokens_per_second is None or task.weight_bytes is None:
        return f"  {machine}"
    return (
        f"  bound {task.bound_tokens_per_second:.0f} {task.unit}: {task.weight_bytes / 1e6:.0f} MB "
        f"of weights, {machine}"
    )


def measure_text(measured: MeasureReport) -> str:
    """A measure's lines: figure, what it is held against, ratio."""
    if measured.failure:
        return "\n".join(_wrapped(f"{measured.workload}: failed: {measured.failure}", "  "))
    lines = [f"{measured.workload}:"]
    for measure in measured.measures:
        lines += _wrapped(_measure_line(measure), "    ")
    return "\n".join(lines)


def _measure_line(measure: Measure) -> str:
    text = f"  {measure.name}: {measure.value:.4g} {measure.unit}"
    if measure.against_value is not None:
        text += f"; {measure.against} {measure.against_value:.4g} {measure.unit}"
    if measure.ratio is not None:
        text += f"; ratio {measure.ratio:.3f}"
    return f"{text} ({measure.note})" if measure.note else text


def goal_line(goal: Goal) -> str:
    """`s1: 90.1, wanted at least 119.1 (1.3 x llama-cpp): missed, 0.76 of it`."""
    bound = "at most" if goal.is_most else "at least"
    end = "reached" if goal.is_reached else f"missed ({goal.share:.2f})"
    says_no_more = goal.rule in (f"{goal.wanted:g} {goal.unit}", "0.8 of offline")
    rule = "" if says_no_more else f" ({goal.rule})"
    figures = f"{goal.figure:.4g} {goal.unit}, wanted {bound} {goal.wanted:.4g}{rule}"
    return f"  {goal.name}: {figures}: {end}"


def engine_notes(report: SuiteReport) -> list[str]:
    """What each engine was, once for each way it was run, with its peak memory and rounds; the
    machine's products; when engines were ready; who failed or is missing, and why."""
    same: dict[str, list[EngineResult]] = {}
    notes, failed = [], []
    for task in report.tasks:
        for result in task.engines:
            if result.info is None:
                failed.append(f"failed: {task.workload}: {result.engine}: {result.failure}")
            else:
                same.setdefault(_settings(result, result.info), []).append(result)
    for settings, results in same.items():
        memory = max(result.peak_memory_bytes for result in results)
        rounds = _range([len(result.seconds) for result in results])
        unit = "round" if rounds == "1" else "rounds"
        notes.append(f"{settings}; up to {memory / 1e6:.0f} MB, {rounds} {unit}")
    notes += _products(report)
    ready = ", ".join(f"{name} {s:.1f} s" for name, s in report.ready_seconds.items())
    if ready:
        notes.append(f"loaded after: {ready}")
    left_out = [f"left out: {name}: {why}" for name, why in report.left_out.items()]
    return [*notes, *failed, *left_out]


def _settings(result: EngineResult, info: EngineInfo) -> str:
    settings = f"; {info.settings}" if info.settings else ""
    return f"{engine_name(result)}: {info.dtype}, {info.num_threads} threads{settings}"


def _products(report: SuiteReport) -> list[str]:
    """The machine's matrix products over the whole run."""
    rates: dict[int, list[int]] = {}
    for task in report.tasks:
        for rows, rate in task.bounds.gemm_flops_per_s:
            rates.setdefault(rows, []).append(round(rate / 1e9))
    by_rows = ", ".join(f"{_range(same)} at {rows} rows" for rows, same in rates.items())
    return [f"bfloat16 products in GFLOP/s: {by_rows}"] if by_rows else []


def _range(values: Sequence[int]) -> str:
    """`3`, or `1 to 5`."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]

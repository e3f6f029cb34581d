# SPDX-License-Identifier: Apache-2.0
"""The suite's report as Markdown tables, for a document."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.benchmarks.suite_goals import goals
from vllm.benchmarks.suite_report import engine_notes
from vllm.benchmarks.suite_results import SuiteReport, TaskReport


def report_markdown(report: SuiteReport) -> str:
    """Workloads by engines, the measures, the goals, the engines' settings."""
    machine = report.machine
    parts = [f"*{machine.processor}, {machine.num_threads} threads, {machine.date}*"]
    if report.tasks:
        parts.append("\n".join(_rates(report)))
    if report.measures:
        parts.append("\n".join(_measures(report)))
    reached = goals(report)
    if reached:
        rows = (
            (
                goal.name,
                f"{goal.figure:.4g} {goal.unit}",
                f"{'at most' if goal.is_most else 'at least'} {goal.wanted:.4g} ({goal.rule})",
                "reached" if goal.is_reached else f"missed, {goal.share:.2f} of it",
            )
            for goal in reached
        )
        parts.append("\n".join(_table(("Goal", "Figure", "Wanted", ""), rows)))
    parts.append("\n".join(f"* {note}" for note in engine_notes(report)))
    return "\n\n".join(parts) + "\n"


def _rates(report: SuiteReport) -> list[str]:
    """A line a workload, a column an engine: its rate and, in brackets, ours over it."""
    engines = list(dict.fromkeys(r.engine for task in report.tasks for r in task.engines))
    head = ("Tokens/s", *engines, "bound", "memory, GB/s")
    return list(_table(head, (_rate_row(task, engines) for task in report.tasks)))


def _rate_row(task: TaskReport, engines: list[str]) -> Iterable[str]:
    yield f"{task.workload}{' (decode)' if task.unit.startswith('decode') else ''}"
    for name in engines:
        result = next((r for r in task.engines if r.engine == name), None)
        if result is None:
            yield ""
        elif result.failure:
            yield "failed"
        else:
            first, ratio = result.first_token_seconds, result.ours_over_it
            text = f"{result.tokens_per_second:.0f}"
            if ratio is not None and result is not task.engines[0]:
                text += f" ({ratio:.2f})"
            yield text if first is None else f"{text}, first {first * 1e3:.0f} ms"
    bound = task.bound_tokens_per_second
    yield "" if bound is None else f"{bound:.0f}"
    yield f"{task.bounds.read_bytes_per_s / 1e9:.1f}"


def _measures(report: SuiteReport) -> Iterable[str]:
    rows = []
    for measured in report.measures:
        if measured.failure:
            rows.append((measured.workload, "failed", measured.failure, ""))
        for m in measured.measures:
            against = ""
            if m.against_value is not None:
                against = f"{m.against} {m.against_value:.4g} {m.unit}"
            ratio = "" if m.ratio is None else f"{m.ratio:.3f}"
            rows.append((m.name, f"{m.value:.4g} {m.unit}", against, ratio))
    return _table(("Measure", "Figure", "Against", "Ratio"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterable[str]:
    head = tuple(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').strip() for cell in row)} |"

# SPDX-License-Identifier: Apache-2.0
"""The suite's table: as text, as JSON, as a picture (SVG)."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from html import escape
from typing import Any

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.report import workload_json, workload_line
from vllm.benchmarks.suite import Task
from vllm.benchmarks.suite_run import TaskResult, TaskTable


def median_bounds(bounds: tuple[Bounds, ...]) -> Bounds:
    """The median of each figure over the rounds."""
    products = zip(*(item.gemm_flops_per_s for item in bounds), strict=True)
    return Bounds(
        statistics.median(item.read_bytes_per_s for item in bounds),
        tuple((same[0][0], statistics.median(rate for _, rate in same)) for same in products),
    )


def bound_rate(task: Task, bounds: Bounds, weight_bytes: int) -> float:
    """Output tokens a second that reading the weights once a decoding step allows, KV cache,
    prompts and arithmetic left out."""
    return task.workload.num_prompts * bounds.read_bytes_per_s / weight_bytes


def table_text(table: TaskTable, weight_bytes: int) -> str:
    """A task's lines: the workload, an engine a line, ours first, the bounds."""
    task, ours, bounds = table.task, table.results[0], median_bounds(table.bounds)
    lines = [
        f"{task.name}: {workload_line(task.workload)}; greedy; median of {len(table.bounds)} "
        "rounds, in turn",
        f"  {'engine':<30} {task.unit:>16} {'ours / it':>10} {'first token':>12} {'memory':>9}",
    ]
    lines += [_engine_line(result, ours, task) for result in table.results]
    gemm = ", ".join(f"{rate / 1e9:.0f} at {rows} rows" for rows, rate in bounds.gemm_flops_per_s)
    lines.append(
        f"  bound by reading {weight_bytes / 1e6:.0f} MB of weights a step: "
        f"{bound_rate(task, bounds, weight_bytes):.0f} tokens/s; memory read "
        f"{bounds.read_bytes_per_s / 1e9:.1f} GB/s; bfloat16 products in GFLOP/s: {gemm}"
    )
    return "\n".join(lines)


def _engine_line(result: TaskResult, ours: TaskResult, task: Task) -> str:
    if result.info is None:
        return f"  {result.engine:<30} failed: {result.failure}"
    info, first = result.info, result.median_first_seconds
    rate, own_rate = result.median_rate(task), ours.median_rate(task)
    first_text = "" if first is None else f"{first * 1e3:.0f} ms"
    memory = f"{result.peak_memory_bytes / 1e6:.0f} MB"
    return (
        f"  {info.name + ' ' + info.version:<30} {rate:16.1f} {own_rate / rate:10.2f} "
        f"{first_text:>12} {memory:>9}  {info.dtype}, {info.num_threads} threads"
        + (f"; {info.settings}" if info.settings else "")
    )


def table_json(table: TaskTable, weight_bytes: int) -> dict[str, Any]:
    """The same, every round included."""
    task, ours, bounds = table.task, table.results[0], median_bounds(table.bounds)
    own_rate = ours.median_rate(task)
    return {
        "workload": task.name,
        **workload_json(task.workload),
        "unit": task.unit,
        "engines": [
            {
                "engine": result.engine,
                **({} if result.info is None else asdict(result.info)),
                "failure": result.failure or None,
                "tokens_per_second": result.median_rate(task),
                "ours_over_it": own_rate / result.median_rate(task) if result.seconds else None,
                "first_token_seconds": result.median_first_seconds,
                "seconds": result.seconds,
                "first_seconds": result.first_seconds,
                "peak_memory_bytes": result.peak_memory_bytes,
                "same_first_tokens_as_ours": sum(
                    a == b for a, b in zip(result.first_tokens, ours.first_tokens)
                ),
            }
            for result in table.results
        ],
        "bounds": [asdict(item) for item in table.bounds],
        "bound_tokens_per_second": bound_rate(task, bounds, weight_bytes),
        "weight_bytes": weight_bytes,
    }


_BAR, _GAP, _LABEL, _WIDTH = 18, 28, 230, 460
_COLOURS = {True: "#1f6feb", False: "#9aa4b2"}


def svg(tables: list[TaskTable]) -> str:
    """Horizontal bars of tokens a second, a group a workload, each on a scale of its own."""
    parts, y = [], 10
    for table in tables:
        parts.append(f'<text x="10" y="{y + 12}" font-weight="bold">{escape(table.task.name)}'
                     f" ({escape(table.task.unit)})</text>")  # fmt: skip
        y += 22
        rates = [result.median_rate(table.task) for result in table.results]
        top = max(rates) or 1.0
        for i, (result, rate) in enumerate(zip(table.results, rates, strict=True)):
            width = max(1, round(_WIDTH * rate / top))
            label = f"{rate:.0f}" if result.info else "failed"
            parts.append(
                f'<text x="20" y="{y + 13}">{escape(result.engine)}</text>'
                f'<rect x="{_LABEL}" y="{y}" width="{width}" height="{_BAR - 4}" '
                f'fill="{_COLOURS[i == 0]}"/><text x="{_LABEL + width + 6}" y="{y + 13}">'
                f"{label}</text>"
            )
            y += _BAR
        y += _GAP - _BAR
    size = f'width="{_LABEL + _WIDTH + 80}" height="{y}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'

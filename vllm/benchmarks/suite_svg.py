# SPDX-License-Identifier: Apache-2.0
"""The suite's tables as a picture: bars in SVG."""

from __future__ import annotations

from html import escape

from vllm.benchmarks.suite_results import EngineResult, SuiteReport, TaskReport

_LABEL, _WIDTH, _RIGHT = 170, 460, 150
_LINE, _BAR, _HEAD, _GAP = 20, 14, 26, 16
_OURS, _PEER, _BOUND = "#1f6feb", "#9aa4b2", "#d1242f"


def svg(report: SuiteReport) -> str:
    """Horizontal bars of tokens a second, a group a workload, each on a scale of its own; the bound
    as a red line where there is one."""
    machine = report.machine
    title = f"{machine.processor}, {machine.num_threads} threads, {machine.date}"
    parts, y = [_text(10, 20, title, bold=True)], 40
    for task in report.tasks:
        group, height = _group(task, y)
        parts += group
        y += height + _GAP
    size = f'width="{_LABEL + _WIDTH + _RIGHT}" height="{y}"'
    style = 'font-family="sans-serif" font-size="12"'
    ground = f'<path d="M0 0h{_LABEL + _WIDTH + _RIGHT}v{y}H0z" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{ground}{"".join(parts)}</svg>\n'
    )


def _group(task: TaskReport, y: int) -> tuple[list[str], int]:
    """Elements of a workload from `y` on, and their height."""
    bound = task.bound_tokens_per_second or 0.0
    top = max([bound, *(result.tokens_per_second for result in task.engines)]) or 1.0
    parts = [_text(10, y + 12, f"{task.workload}: {task.description} ({task.unit})", bold=True)]
    begin = y + _HEAD
    for i, result in enumerate(task.engines):
        parts += _bar(result, begin + i * _LINE, top, _OURS if i == 0 else _PEER)
    height = _HEAD + _LINE * len(task.engines)
    if bound:
        x = _LABEL + round(_WIDTH * bound / top)
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{begin - 4}" y2="{y + height - 2}" stroke="{_BOUND}" '
            'stroke-width="1.5"/>'
        )
        parts.append(_text(x + 4, begin - 6, f"bound {bound:.0f}", colour=_BOUND))
    return parts, height


def _bar(result: EngineResult, y: int, top: float, colour: str) -> list[str]:
    width = max(1, round(_WIDTH * result.tokens_per_second / top))
    figure = f"{result.tokens_per_second:.0f}" if result.info else "failed"
    return [
        _text(20, y + 11, result.engine),
        f'<rect x="{_LABEL}" y="{y}" width="{width}" height="{_BAR}" fill="{colour}"/>',
        _text(_LABEL + width + 6, y + 11, figure),
    ]


def _text(x: int, y: int, text: str, bold: bool = False, colour: str = "#1c2128") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{colour}"{weight}>{escape(text)}</text>'

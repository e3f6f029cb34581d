# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file, with the drawings of layouts in it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from vllm_platform_kit.findings import ADVICE
from vllm_platform_kit.report import WORDS, Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0;
  border-top: 1px solid #d0d7de; overflow-wrap: anywhere; }
code { font-size: 0.9em; }
.passed { color: #1a7f37; } .failed { color: #c4181f; font-weight: bold; } .skipped { color: #57606a; }
.note { color: #57606a; font-size: 0.9em; }
svg { max-width: 100%; height: auto; border: 1px solid #d0d7de; margin: 0.5rem 0; }
"""


def as_html(report: Report) -> str:
    """The whole page; it loads nothing."""
    return "\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    title = f"vLLM platform kit: {escape(report.target.name)}"
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
    yield f"<p>With {escape(report.target.engine)}. {escape(report.verdict())}.</p>"
    if report.findings:
        yield "<h2>Findings</h2><table><tr><th>Code</th><th>What is wrong</th><th>What to do</th></tr>"
        for one in report.findings:
            cells = f"<code>{one.code}</code>", f"{one.subject}: {one.what}", ADVICE[one.code]
            yield _row(cells[0], *map(escape, cells[1:]))
        yield "</table>"
    yield "<h2>Checks</h2><table>"
    for check in report.checks:
        word = f'<span class="{check.outcome}">{WORDS[check.outcome]}</span>'
        notes = "".join(f'<div class="note">{escape(note)}</div>' for note in check.notes)
        yield _row(word, escape(check.name), escape(check.reason) + notes)
    yield "</table><h2>Hooks</h2><table>"
    for hook in sorted(report.hooks, key=lambda one: one.is_default):
        where = hook.without if hook.is_default else hook.owner
        kind = "default" if hook.is_default else "override"
        yield _row(f"<code>{hook.name}</code>", kind, escape(where))
    yield "</table>"
    drawings = [(check.name, svg) for check in report.checks for svg in check.drawings]
    if drawings:
        yield "<h2>Layouts</h2>"
    for name, svg in drawings:
        yield f"<h3>{escape(name)}</h3>\n{svg}"
    yield "</body></html>"


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

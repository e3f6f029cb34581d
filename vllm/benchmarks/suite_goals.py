# SPDX-License-Identifier: Apache-2.0
"""What this project wants to reach on a CPU, held against the figures of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.benchmarks.suite_results import SuiteReport, TaskReport

READY_WARM, READY_COLD = "ready, warm caches", "ready, cold caches"
HTTP_SHARE = "HTTP, 32 streams"
CONTEXT_STEP = "longer context, extra time of a step"
STEP_OVERHEAD = "scheduling and input preparation at b64"
QUEUED_STEP = "a step with 10,000 requests queued"
# Measure -> the most that its ratio or, where it has none, its value may be.
_AT_MOST = {CONTEXT_STEP: 1.3, STEP_OVERHEAD: 0.05, QUEUED_STEP: 1.05}
_READY_SECONDS = {READY_WARM: 10.0, READY_COLD: 20.0}


@dataclass(frozen=True)
class Goal:
    """A figure, and what it should be at least or, where `is_most`, at most."""

    name: str
    figure: float
    wanted: float
    unit: str
    rule: str
    is_most: bool = False

    @property
    def share(self) -> float:
        """1 or more: reached. How far it is, otherwise."""
        if self.is_most:
            return self.wanted / self.figure if self.figure > 0 else 1.0
        return self.figure / self.wanted if self.wanted else 1.0

    @property
    def is_reached(self) -> bool:
        return self.share >= 1


def goals(report: SuiteReport) -> list[Goal]:
    """Those for which the run has the figures that they take."""
    found: list[Goal] = []
    for task in report.tasks:
        if task.engines and not task.engines[0].failure:
            found += _task_goals(task)
    return [*found, *_measure_goals(report)]


def _task_goals(task: TaskReport) -> Iterator[Goal]:
    ours, unit, name = task.engines[0].tokens_per_second, task.unit, task.workload

    def peers(*names: str) -> float:
        results = [task.result(peer) for peer in names]
        return max((r.tokens_per_second for r in results if r is not None), default=0.0)

    def ahead_of(factor: float, *names: str) -> Iterator[Goal]:
        if peers(*names):
            rule = f"{factor:g} x {' or '.join(names)}"
            yield Goal(name, ours, factor * peers(*names), unit, rule)

    if name == "s1":
        yield from _single_goals(task)
    elif name in ("b8", "b32", "b64"):
        yield from ahead_of(1.2, "openvino-genai")
        if name == "b32" and task.bound_tokens_per_second:
            yield Goal(name, ours, 0.75 * task.bound_tokens_per_second, unit, "0.75 x the bound")
    elif name == "prefix":
        yield from ahead_of(1.5, "upstream")
    elif name == "s1-int8":
        yield from ahead_of(1.2, "llama-cpp")
    elif name == "s1-int4":
        yield from ahead_of(1.1, "llama-cpp")
    elif name.startswith("bart"):
        yield from ahead_of(1.2, "ctranslate2", "openvino-genai")


def _single_goals(task: TaskReport) -> Iterator[Goal]:
    """One stream: the smaller of a lead and what memory allows; the first token."""
    ours = task.engines[0]
    peer, openvino = task.result("llama-cpp"), task.result("openvino-genai")
    rules = {}
    if peer is not None:
        rules["1.3 x llama-cpp"] = 1.3 * peer.tokens_per_second
    if task.weight_bytes:
        read = task.bounds.read_bytes_per_s / task.weight_bytes
        rules["0.85 x memory read / weights"] = 0.85 * read
    if rules:
        rule = min(rules, key=rules.__getitem__)
        yield Goal("s1", ours.tokens_per_second, rules[rule], task.unit, rule)
    if openvino is not None and openvino.first_token_seconds and ours.first_token_seconds:
        first, wanted = 1e3 * ours.first_token_seconds, 1e3 * openvino.first_token_seconds
        yield Goal("s1, first token", first, wanted, "ms", "openvino-genai's", is_most=True)


def _measure_goals(report: SuiteReport) -> Iterator[Goal]:
    for measured in report.measures:
        for measure in measured.measures:
            if measure.name == HTTP_SHARE and measure.ratio is not None:
                yield Goal(measure.name, measure.ratio, 0.8, "of offline", "0.8 of offline")
            elif measure.name in _AT_MOST and measure.ratio is not None:
                most = _AT_MOST[measure.name]
                rule = f"{most:g} of {measure.against}"
                yield Goal(measure.name, measure.ratio, most, "", rule, is_most=True)
            elif measure.name in _READY_SECONDS:
                most = _READY_SECONDS[measure.name]
                yield Goal(measure.name, measure.value, most, "s", f"{most:g} s", is_most=True)

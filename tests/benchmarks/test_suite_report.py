# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench compare` found: every form of it says the same, and goals are held to it."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from tests.benchmarks.engines import CannedEngine
from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.model_size import ModelSize, bound_seconds, weights_of
from vllm.benchmarks.suite import Task
from vllm.benchmarks.suite_build import median_bounds, task_report
from vllm.benchmarks.suite_goals import HTTP_SHARE, QUEUED_STEP, READY_COLD, goals
from vllm.benchmarks.suite_markdown import report_markdown
from vllm.benchmarks.suite_report import WIDTH, report_text
from vllm.benchmarks.suite_results import (
    Machine, Measure, MeasureReport, SuiteReport, TaskReport, from_json, to_json,
)  # fmt: skip
from vllm.benchmarks.suite_run import run_task
from vllm.benchmarks.suite_svg import svg
from vllm.benchmarks.workload import Workload, random_workload

BOUNDS = Bounds(50e9, ((8, 2e11), (64, 5e11), (2048, 9e11)))
SIZE = ModelSize(10**9, 4 * 10**8, 10**8, 1000)
WORKLOAD = random_workload(4, 8, 16, vocab_size=100, seed=0)
FIRST = Workload(WORKLOAD.prompts, 1)


def task(name: str, seconds: dict[str, float], first: float | None = None) -> TaskReport:
    """A table of engines that took so long, ours named first; `failing`: gives too few tokens."""
    engines = [
        CannedEngine(engine, [s, first or s] * 3, output_len=3 if engine == "failing" else None)
        for engine, s in seconds.items()
    ]
    tells_first = first is not None
    table = run_task(
        engines, Task(name, WORKLOAD, FIRST if tells_first else None), 3, lambda: BOUNDS
    )
    return task_report(table, SIZE)


def report(*tasks: TaskReport, measures: tuple[Measure, ...] = ()) -> SuiteReport:
    machine = Machine("A processor", 2, "2026-01-02")
    measured = tuple(MeasureReport(m.name, (m,)) for m in measures)
    return SuiteReport(
        machine, "model", "bf16", tasks, measured, {"vllm": 2.5}, {"upstream": "not here"}
    )


def test_all_forms_say_the_same():
    b32 = task("b32", {"vllm": 1.0, "openvino-genai": 3.0, "failing": 0.5})
    broken = MeasureReport("growth", failure="the engine said no")
    found = dataclasses.replace(report(b32), measures=(broken,))
    assert from_json(to_json(found)) == found
    ours, peer, failing = b32.engines
    assert (ours.tokens_per_second, peer.tokens_per_second) == (64.0, 64.0 / 3)
    assert peer.ours_over_it == pytest.approx(3.0) and peer.same_first_tokens_as_ours == 4
    assert failing.info is None and failing.tokens_per_second == 0
    text, markdown = report_text(found), report_markdown(found)
    for form in (text, markdown):
        for said in (
            "64", "21", "3.00", "not here", "the engine said no", "2.5 s", "up to 1 MB, 3 rounds",
            "failing gave 4 outputs of [3] tokens", "500 at 64 rows",
        ):  # fmt: skip
            assert said in " ".join(form.split()), (said, form)
    assert "memory read 50.0 GB/s" in text and "200 at 8 rows" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    bars = ET.fromstring(svg(found)).findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 3


def test_what_is_no_result_is_refused():
    for text in ("", "[1]", '{"machine": 1}'):
        with pytest.raises(ValueError, match="no results of `vllm bench compare`"):
            from_json(text)


def test_bars_are_as_long_as_the_rates():
    """The bound is on the scale of the bars: the line stands where a bar of its rate would end."""
    table = dataclasses.replace(
        task("b8", {"vllm": 1.0, "peer": 2.0}), bound_tokens_per_second=128.0
    )
    root = ET.fromstring(svg(report(table)))
    space = "{http://www.w3.org/2000/svg}"
    widths = [int(bar.get("width")) for bar in root.findall(space + "rect")]
    start = int(root.find(space + "rect").get("x"))
    end = int(root.find(space + "line").get("x1")) - start
    assert widths == [end / 2, end / 4]


def test_goals_of_workloads():
    """What is compared with whom; a peer that was not measured makes no goal."""
    b8 = task("b8", {"vllm": 1.0, "openvino-genai": 1.1, "llama-cpp": 0.1})
    prefix = task("prefix", {"vllm": 1.0, "upstream": 1.6})
    bart = task("bart1", {"vllm": 1.0, "ctranslate2": 1.3, "openvino-genai": 1.25})
    found = goals(report(b8, prefix, bart, task("b64", {"vllm": 1.0})))
    assert [(goal.name, round(goal.share, 3), goal.is_reached) for goal in found] == [
        ("b8", round(1.1 / 1.2, 3), False),
        ("prefix", round(1.6 / 1.5, 3), True),
        ("bart1", round(1.25 / 1.2, 3), True),
    ]


def test_goals_of_one_stream():
    """The smaller of the lead and the bound by memory; the first token is at most the peer's."""
    s1 = task("s1", {"vllm": 2.1, "llama-cpp": 2.1, "openvino-genai": 2.1}, first=0.1)
    rate, first = goals(report(s1))
    # 4 prompts, 15 tokens after the first, 2.0 s; 50 GB/s over 1 GB
    assert rate.figure == pytest.approx(30.0)
    assert rate.wanted == pytest.approx(min(1.3 * 30.0, 0.85 * 50))
    assert first.is_most and first.figure == first.wanted and first.is_reached


def test_goals_of_measures():
    found = goals(
        report(
            measures=(
                Measure(HTTP_SHARE, 70.0, "tokens/s", "offline", 100.0, 0.7),
                Measure(QUEUED_STEP, 1.0, "ms", "none queued", 1.0, 1.0),
                Measure(READY_COLD, 25.0, "s", "upstream", 100.0, 0.25),
            )
        )
    )
    assert [(goal.share, goal.is_reached) for goal in found] == [
        (0.7 / 0.8, False), (1.05, True), (0.8, False)
    ]  # fmt: skip


def test_bound_of_a_run():
    """By hand: prompts at the fastest product's rate, then steps that wait for memory or
    products."""
    one = Workload((tuple(range(10)),), 11)
    prompt = max(2 * (10 * 4e8 + 1e8) / 9e11, 1e9 / 50e9)
    step = max((1e9 + (10 + 5.5) * 1000) / 50e9, 2 * 5e8 / 2e11)
    assert bound_seconds(one, SIZE, BOUNDS) == pytest.approx(prompt + 10 * step)
    # 64 rows: products of 2 * 64 * 5e8 FLOP at 5e11 take longer than reading.
    many = random_workload(64, 10, 2, vocab_size=50, seed=0)
    prompts = 2 * (640 * 4e8 + 64 * 1e8) / 9e11
    assert bound_seconds(many, SIZE, BOUNDS) == pytest.approx(prompts + 2 * 64 * 5e8 / 5e11)


def test_what_prompts_share_is_bounded_once():
    """Guards against a bound that caching prefixes could beat."""
    shared = tuple(range(100))
    alike = Workload(tuple((*shared, i) for i in range(8)), 1)
    apart = Workload(tuple((i, *shared) for i in range(8)), 1)
    assert bound_seconds(alike, SIZE, BOUNDS) < bound_seconds(apart, SIZE, BOUNDS) / 4


def test_bounds_of_rounds_are_medians():
    bounds = tuple(Bounds(rate, ((8, 10 * rate),)) for rate in (1.0, 9.0, 2.0))
    assert median_bounds(bounds) == Bounds(2.0, ((8, 20.0),))


def test_weights_are_counted_and_weighed():
    """A shared weight once; a quantised one by the bytes that are read, though as many weights."""
    import torch
    from torch import nn

    from vllm.model_executor.layers.cpu_ops.quant_format import INT8
    from vllm.model_executor.layers.quantization.parameter import QuantizedParameter

    model = nn.Module()
    model.table = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    model.output = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    model.output.weight = model.table.weight
    assert weights_of(model) == (2 * 32 * 64, 32 * 64)
    weight = QuantizedParameter(32, 64, 64, torch.bfloat16, INT8)
    weight.stage(torch.bfloat16).data.fill_(1.0)
    weight.finish()
    model.table.weight = model.output.weight = weight
    assert weights_of(model) == (32 * 2 * INT8.block_bytes, 32 * 64)

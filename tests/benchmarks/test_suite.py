# SPDX-License-Identifier: Apache-2.0
"""`vllm bench compare`: all engines do the same work, in turn, and a failing one spoils nothing."""

from __future__ import annotations

import pytest

from tests.benchmarks.engines import CannedEngine
from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.peers import common_prefix_len
from vllm.benchmarks.suite import (
    BART, TASKS, EngineSet, Task, expand_names, make_task, share_of_time,
)  # fmt: skip
from vllm.benchmarks.suite_run import run_task
from vllm.benchmarks.workload import Workload, random_workload

BOUNDS = Bounds(50e9, ((8, 2e11), (64, 5e11)))
WORKLOAD = random_workload(4, 8, 16, vocab_size=100, seed=0)
TASK = Task("t", WORKLOAD)
LENGTHS = {"b": (32, 256), "bart": (128, 512)}


def measured(*engines: CannedEngine, rounds: int = 3, limit_s: float | None = None):
    return run_task(engines, TASK, rounds, lambda: BOUNDS, limit_s=limit_s)


def test_tasks_are_what_they_say():
    """The same prompts for a seed, lengths and counts as documented, no excluded id."""
    shapes = {}
    for name in TASKS:
        task, again = (make_task(name, 1000, 3, [5, 6]) for _ in range(2))
        assert task == again and task.name == name
        assert not {5, 6} & {i for prompt in task.workload.prompts for i in prompt}
        shapes[name] = (task.workload.num_prompts, task.workload.output_len)
        lengths = [len(prompt) for prompt in task.workload.prompts]
        low, high = LENGTHS.get(name.rstrip("0123456789"), (1, 528))
        assert low <= min(lengths) and max(lengths) <= high
        assert (task.engine_set == BART) == name.startswith("bart")
    assert shapes == {
        "s1": (1, 128), "b8": (8, 128), "b32": (32, 128), "b64": (64, 128), "prefix": (32, 64),
        "s1-int8": (1, 128), "s1-int4": (1, 128),
        "bart1": (1, 64), "bart8": (8, 64), "bart32": (32, 64),
    }  # fmt: skip
    assert make_task("s1-int8", 1000, 3).engine_set == EngineSet("int8")
    prompts = make_task("prefix", 1000, 3).workload.prompts
    assert {len(prompt) for prompt in prompts} == {528}
    assert common_prefix_len(prompts) == 512
    with pytest.raises(ValueError, match="no workload 'b9'"):
        make_task("b9", 100, 0)


def test_first_token_is_told_apart():
    """Guards against a decode rate that has the prompt's time in it."""
    task = Task("s", WORKLOAD, Workload(WORKLOAD.prompts, 1))
    assert task.rate(seconds=4.0, first_seconds=1.0) == 4 * 15 / 3.0
    assert TASK.rate(seconds=4.0, first_seconds=None) == 16.0


def test_every_engine_begins_once():
    """Guards against one engine always running on the caches, clocks and heat that another left."""
    calls: list[str] = []
    engines = [CannedEngine(name, [1.0] * 3, calls=calls) for name in "abc"]
    measured(*engines)
    assert calls[:3] == ["a prepare", "b prepare", "c prepare"]
    assert [calls[i].split()[0] for i in range(3, 12)] == list("abcbcacab")


def test_a_failing_engine_is_left_out():
    """One that gives too few tokens has no figure; the others keep theirs."""
    table = measured(
        CannedEngine("ours", [1.0, 2.0, 1.0]), CannedEngine("short", [0.1] * 3, output_len=3)
    )
    ours, short = table.results
    assert ours.median_rate(TASK) == 64.0 and short.median_rate(TASK) == 0.0
    assert "gave 4 outputs of [3] tokens" in short.failure
    assert short.info is None and not short.seconds


def test_an_engine_that_used_up_its_time_sits_out():
    """Guards against a slow peer that takes the time of the others' rounds, and against one that
    has no figure at all."""
    slow, quick = CannedEngine("slow", [1.0] * 3, takes_s=0.03), CannedEngine("quick", [1.0] * 3)
    table = measured(slow, quick, limit_s=0.05)
    assert [len(result.seconds) for result in table.results] == [1, 3]
    assert not any(result.failure for result in table.results)
    assert len(table.bounds) == 3


def test_time_is_shared_out_whole():
    """Guards against a run that takes longer than its limit, and one that leaves time unused."""
    names, left, time_left = sum(expand_names(None), []), [], 1.0
    for name in names:
        left = names[names.index(name) :]
        time_left -= time_left * share_of_time(name, left)
    assert time_left == pytest.approx(0.0) and left == [names[-1]]
    assert share_of_time("b64", names) > 4 * share_of_time("s1", names)


def test_names_of_workloads():
    """Each once, in the tables' order, whatever the order that was asked for."""
    assert expand_names(None) == (list(TASKS), ["http", "growth", "ready"])
    assert expand_names(["ready", "bart", "bart8", "s1"]) == (
        ["s1", "bart1", "bart8", "bart32"], ["ready"]
    )  # fmt: skip

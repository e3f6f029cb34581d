# SPDX-License-Identifier: Apache-2.0
"""`vllm bench compare` from end to end with engines that answer at once: what is gone on from, and
that one failure costs no other figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.benchmarks.engines import CannedBoundsSpec, CannedSpec
from tests.benchmarks.test_bench_cli import vllm
from vllm.benchmarks import suite_all
from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.process import EngineFailed, reason
from vllm.benchmarks.suite_all import Suite, SuiteOptions
from vllm.benchmarks.suite_results import (
    Machine, Measure, MeasureReport, SuiteReport, read_report, to_json,
)  # fmt: skip
from vllm.benchmarks.suite_run import LastBounds
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

THIS = Machine.this()
FIGURE = (Measure("speed", 2.0, "tokens/s"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[EngineArgs, ModelConfig]:
    """A model's configuration; the engines here need no weights."""
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True)
    return args, args.create_model_config()


@pytest.fixture
def machinery(monkeypatch):
    """Installs engines, a probe that measures so often, and measures."""

    def install(ours="", peer="", probe=CannedBoundsSpec(99), measures=lambda name, plan: FIGURE):
        monkeypatch.setattr(suite_all, "BoundsSpec", lambda: probe)
        monkeypatch.setattr(suite_all, "VllmSpec", lambda args: CannedSpec("vllm", ours))
        monkeypatch.setattr(suite_all, "missing_reason", lambda name, options: None)
        monkeypatch.setattr(suite_all, "make_peers", lambda name, options: [CannedSpec(name, peer)])
        monkeypatch.setattr(suite_all, "run_measure", measures)

    return install


def suite(model, *names: str, before: SuiteReport | None = None, **fields) -> Suite:
    options = SuiteOptions(
        model[0], "bf16", names, ("transformers",), num_iters=1, time_limit_s=None, timeout_s=30.0
    )
    return Suite(dataclasses.replace(options, **fields), model[1], before)


def empty(model) -> SuiteReport:
    return SuiteReport(Machine.this(), Path(model[1].model).name, "bf16")


@pytest.mark.parametrize(
    "what, change",
    [
        ("model other, now llama", {"model": "other"}),
        ("precision int8, now bf16", {"precision": "int8"}),
        ("processor Z80", {"machine": dataclasses.replace(THIS, processor="Z80")}),
        ("number of threads 999", {"machine": dataclasses.replace(THIS, num_threads=999)}),
    ],
)
def test_another_runs_file_is_refused(model, what, change):
    """Guards against figures of one model or machine under the heading of another."""
    before = dataclasses.replace(empty(model), **change)
    with pytest.raises(ValueError) as refused:
        suite(model, "s1", before=before)
    assert what in str(refused.value) and "\n" not in str(refused.value)
    day = dataclasses.replace(THIS, date="2001-01-01")
    assert suite(model, before=dataclasses.replace(empty(model), machine=day)).report.machine == day


def test_what_failed_is_done_again(model, machinery, tmp_path):
    """A peer that failed in a workload, one that could not be loaded and a measure that failed get
    their figures from the run that goes on; what was whole is not run again."""
    file = str(tmp_path / "results.json")
    machinery(peer="dies in run")
    suite(model, "s1", output_json=file).run()
    machinery(peer="raises in build", measures=lambda name, plan: {}[name])
    suite(model, "s1-int8", "http", output_json=file, before=read_report(file)).run()
    before = read_report(file)
    assert before.task("s1").result("transformers") is None
    assert list(before.left_out) == ["transformers (int8)"]
    assert before.measured("http").failure == "KeyError: 'http'"

    machinery()
    names = ("s1", "s1-int8", "http", "growth")
    after = suite(model, *names, output_json=file, before=before).run()
    assert read_report(file) == after
    assert [task.workload for task in after.tasks] == ["s1", "s1-int8"]
    assert after.task("s1").result("transformers").tokens_per_second > 0
    # This one was whole without the peer: it is kept, and so is the reason.
    assert after.task("s1-int8") == before.task("s1-int8")
    assert after.left_out == before.left_out
    assert after.measures == (MeasureReport("http", FIGURE), MeasureReport("growth", FIGURE))

    machinery(ours="raises in build", measures=None)
    assert suite(model, *names, before=after).run() == after


def test_what_has_figures_is_no_longer_left_out(model, machinery):
    """Guards against a report that says both; what concerns other engines stays."""
    left_out = {"transformers": "not installed", "s1": "no", "bounds": "no", "upstream": "no"}
    machinery()
    after = suite(model, "s1", before=dataclasses.replace(empty(model), left_out=left_out)).run()
    assert after.task("s1").result("transformers") and after.left_out == {"upstream": "no"}


def test_a_failing_workload_costs_no_other(model, machinery, monkeypatch):
    """Whatever is raised in this process, while engines are found or a workload is run, the next
    one is run and the report says why the other is missing."""
    machinery()

    def specs(args):
        if args.quantization == "int8":
            raise ImportError("no\nlibrary")
        return CannedSpec("vllm")

    def fails_once(engines, task, *others):
        if task.name == "s1":
            raise KeyError("s1")
        return run_task(engines, task, *others)

    run_task = suite_all.run_task
    monkeypatch.setattr(suite_all, "VllmSpec", specs)
    monkeypatch.setattr(suite_all, "run_task", fails_once)
    after = suite(model, "s1", "b8", "s1-int8", "s1-int4", "http", time_limit_s=60.0).run()
    assert [task.workload for task in after.tasks] == ["b8", "s1-int4"]
    assert after.left_out == {
        "s1": "KeyError: 's1'", "s1-int8 (int8)": "ImportError: no library"
    }  # fmt: skip
    assert after.measured("http").measures == FIGURE


def test_a_peer_that_cannot_be_looked_for(model, machinery, monkeypatch):
    machinery()

    def broken(name, options):
        raise ImportError("half installed")

    monkeypatch.setattr(suite_all, "make_peers", broken)
    after = suite(model, "s1").run()
    assert [result.engine for result in after.task("s1").engines] == ["vllm"]
    assert after.left_out == {"transformers": "ImportError: half installed"}


@pytest.mark.parametrize("times", [0, 1, 2])
def test_probe_whose_process_ends(model, machinery, times):
    """Its last bounds stand in for later rounds and workloads; without any there is no table, and
    the measures are taken all the same."""
    machinery(probe=CannedBoundsSpec(times))
    after = suite(model, "s1", "b8", "http").run()
    if times:
        assert [task.bounds for task in after.tasks] == [Bounds(50e9, ((8, 2e11),))] * 2
        assert not after.left_out
        assert all(task.result("vllm") and task.result("transformers") for task in after.tasks)
    else:
        assert not after.tasks and set(after.left_out) == {"s1", "b8"}
        assert "exit status 7" in after.left_out["s1"]
    assert after.measured("http").measures == FIGURE


def test_last_bounds_stand_in():
    answers = [Bounds(1.0, ()), Bounds(2.0, ())]

    def measure() -> Bounds:
        if not answers:
            raise EngineFailed("gone")
        return answers.pop(0)

    bounds = LastBounds(measure)
    assert [bounds().read_bytes_per_s for _ in range(3)] == [2.0, 2.0, 2.0]
    with pytest.raises(EngineFailed):
        LastBounds(measure)


def test_reasons_are_one_line():
    assert reason(ValueError("a\n b")) == "a b" and reason(EngineFailed("c")) == "c"
    assert reason(KeyError("k")) == "KeyError: 'k'" and reason(ValueError()) == "ValueError"


def test_the_command_refuses_in_one_line(model, tmp_path):
    """Guards against a traceback for a wrong file."""
    file = tmp_path / "results.json"
    file.write_text(to_json(dataclasses.replace(empty(model), precision="int4")))
    flags = ["--model", model[0].model, "--skip-tokenizer-init", "--resume"]
    done = vllm("bench", "compare", *flags, "--output-json", str(file))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "precision int4, now bf16" in done.stderr

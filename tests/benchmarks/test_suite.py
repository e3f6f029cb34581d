# SPDX-License-Identifier: Apache-2.0
"""`vllm bench compare`: all engines do the same work, in turn, and a failing one spoils nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from tests.benchmarks.engines import CannedEngine
from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.peers import PEERS, PeerOptions, common_prefix_len, make_peer, missing_reason
from vllm.benchmarks.suite import TASKS, Task, make_task
from vllm.benchmarks.suite_report import svg, table_json, table_text
from vllm.benchmarks.suite_run import run_task
from vllm.benchmarks.workload import Workload, random_workload

BOUNDS = Bounds(50e9, ((8, 2e11), (64, 5e11)))
WORKLOAD = random_workload(4, 8, 16, vocab_size=100, seed=0)
TASK = Task("t", WORKLOAD)


def measured(*engines: CannedEngine, task: Task = TASK, rounds: int = 3):
    return run_task(engines, task, rounds, lambda: BOUNDS)


def test_tasks_are_what_they_say():
    """The same prompts for a seed, lengths and counts as documented, no excluded id."""
    shapes = {}
    for name in TASKS:
        task, again = (make_task(name, 1000, 3, [5, 6]) for _ in range(2))
        assert task == again and task.name == name
        assert not {5, 6} & {i for prompt in task.workload.prompts for i in prompt}
        shapes[name] = (task.workload.num_prompts, task.workload.output_len)
        lengths = [len(prompt) for prompt in task.workload.prompts]
        assert name[0] != "b" or (min(lengths) >= 32 and max(lengths) <= 256)
    assert shapes == {
        "s1": (1, 128), "b8": (8, 128), "b32": (32, 128), "b64": (64, 128), "prefix": (32, 64)
    }  # fmt: skip
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
    assert "failed: short gave" in table_text(table, 10**6)


def test_reports_say_the_same():
    table = measured(CannedEngine("ours", [1.0] * 3), CannedEngine("peer", [3.0] * 3, token=8))
    result = json.loads(json.dumps(table_json(table, 10**9)))
    assert [engine["tokens_per_second"] for engine in result["engines"]] == [64.0, 64.0 / 3]
    assert result["engines"][1]["ours_over_it"] == pytest.approx(3.0)
    assert result["engines"][1]["same_first_tokens_as_ours"] == 0
    assert result["bound_tokens_per_second"] == 4 * 50
    text = table_text(table, 10**9)
    assert "memory read 50.0 GB/s" in text and "200 at 8 rows" in text
    bars = ET.fromstring(svg([table])).findall("{http://www.w3.org/2000/svg}rect")
    assert [int(bar.get("width")) for bar in bars] == [460, 153]


def test_peers_that_cannot_run_say_why(monkeypatch):
    options = PeerOptions("model-folder", "bfloat16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reasons = {name: missing_reason(name, options) for name in PEERS}
    assert reasons.pop("transformers") is None
    assert "--upstream-python" in reasons.pop("upstream")
    assert all("pip install" in reason for reason in reasons.values())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    assert "GGUF" in missing_reason("llama-cpp", options)
    int4 = PeerOptions("m.gguf", "bfloat16", "int4")
    assert missing_reason("llama-cpp", int4) is None
    assert "has no int4" in missing_reason("transformers", int4)
    assert all(make_peer(name, options).name == name for name in PEERS)


def test_gguf_in_another_kind(tmp_path, monkeypatch):
    """Metadata and values survive; a file that is of the kind already is used as it is."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    from vllm.benchmarks.peers.model_files import gguf_file

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    source = tmp_path / "m.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_context_length(77)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(1)
    matrix = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float16)
    writer.add_tensor("a.weight", matrix)
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_file(str(source), "F16") == source
    made = gguf_file(str(source), "Q8_0")
    assert made == gguf_file(str(source), "Q8_0") and made != source
    reader = GGUFReader(made)
    assert reader.get_field("llama.context_length").contents() == 77
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert kinds == {
        "a.weight": GGMLQuantizationType.Q8_0, "norm.weight": GGMLQuantizationType.F32
    }  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""What is measured of our engine besides a workload's rate: real engines, small ones."""

from __future__ import annotations

import dataclasses
import sys
import time

import psutil
import pytest

from vllm.benchmarks.measures import MeasurePlan, growth, http, ready
from vllm.benchmarks.measures.server import ServerCommand, running, with_cold_caches
from vllm.benchmarks.process import EngineFailed, plain_environment
from vllm.benchmarks.suite_goals import (
    CONTEXT_STEP, HTTP_SHARE, QUEUED_STEP, READY_COLD, READY_WARM, STEP_OVERHEAD,
)  # fmt: skip
from vllm.engine.arg_utils import EngineArgs

SERVER = """
import http.server, sys
port = int(sys.argv[-1].removeprefix("--port="))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(code: str) -> ServerCommand:
    return ServerCommand((sys.executable, "-c", code), plain_environment())


def test_a_server_is_ready_and_ended():
    before = set(psutil.Process().children())
    with running(command(SERVER), "small", timeout_s=30.0) as server:
        assert 0 < server.ready_seconds < 30 and server.port > 0
        assert set(psutil.Process().children()) - before
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import sys; sys.exit('no such model')", "not ready: no such model"),
        ("import time; print('thinking', flush=True); time.sleep(60)", "not ready: thinking"),
    ],
)
def test_a_server_that_is_never_ready(code, reason):
    """Guards against a wait for ever, and a reason that stays in a log."""
    with pytest.raises(EngineFailed, match=reason), running(command(code), "it", timeout_s=1.0):
        pytest.fail("it never answered")


def test_cold_caches_lie_in_the_folder(tmp_path):
    """Guards against a cold start that finds what a user's runs left."""
    cold = with_cold_caches(command(SERVER), tmp_path).environment
    moved = {name for name, value in cold.items() if value.startswith(str(tmp_path))}
    assert moved == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR"}


def plan(model: str = "", upstream_python: str | None = None) -> MeasurePlan:
    args = EngineArgs(
        model=model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 26
    )
    return MeasurePlan(args, 1, 512, (), 120.0, lambda what: None, upstream_python)


def test_starts_are_told_apart(monkeypatch):
    """Cold starts come first and have a folder of their own; upstream's failure costs only its own
    figure, and is told."""
    starts = []

    def start(plan, server, name):
        starts.append((name, server.environment["VLLM_CACHE_ROOT"]))
        if name.startswith("upstream"):
            raise EngineFailed("upstream is not ready: no module")
        return 9.0 if name.endswith("cold") else 3.0

    monkeypatch.setattr(ready, "_start", start)
    monkeypatch.setattr(ready, "hf_folder", lambda model, dtype: "folder")
    warm, cold = ready.run(plan(upstream_python="/upstream/python"))
    assert (warm.name, warm.value, cold.name, cold.value) == (READY_WARM, 3.0, READY_COLD, 9.0)
    assert warm.ratio is None and "upstream is not ready: no module" in warm.note
    assert [name for name, _ in starts] == [
        "vllm, 1 of 1, cold", "vllm, 1 of 1, warm", "upstream, cold"
    ]  # fmt: skip
    assert starts[0][1] == starts[1][1] != starts[2][1]


def test_upstreams_model_cannot_be_made(monkeypatch):
    """Guards against the loss of our figures when a library for its model's files is missing."""

    def folder(model, dtype):
        raise ImportError("no accelerate")

    monkeypatch.setattr(ready, "_start", lambda plan, server, name: 3.0)
    monkeypatch.setattr(ready, "hf_folder", folder)
    for measure in ready.run(plan(upstream_python="/upstream/python")):
        assert measure.value == 3.0 and measure.ratio is None
        assert "upstream failed: ImportError: no accelerate" in measure.note


def test_rounds_end_when_the_time_is_up():
    """One is done whatever the time; no further one after it."""
    endless = dataclasses.replace(plan(), num_iters=4)
    assert list(endless.rounds(3)) == ["1 of 3", "2 of 3", "3 of 3"]
    late = dataclasses.replace(endless, ends_at=time.perf_counter())
    assert list(late.rounds()) == ["1 of 4"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """A small Llama with random weights, long positions, and a word for each id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(path)
    return str(path)


@pytest.mark.slow
def test_growth(model_path, monkeypatch):
    """Three figures, each with what it is held against, from one engine."""
    for name, value in {"LONG": 320, "MANY_STREAMS": 4, "QUEUED": 30}.items():
        monkeypatch.setattr(growth, name, value)
    context, overhead, queued = growth.run(plan(model_path))
    assert (context.name, overhead.name, queued.name) == (CONTEXT_STEP, STEP_OVERHEAD, QUEUED_STEP)
    # 2 layers, K and V of 2 heads of 16, float32
    assert f"{8 * (320 - 256) * 2 * 2 * 2 * 16 * 4 / 1e6:.0f} MB" in context.note
    assert 0 < overhead.ratio < 1
    for measure in (overhead, queued):
        assert measure.value > 0
        assert measure.value / measure.against_value == pytest.approx(measure.ratio)


@pytest.mark.slow
def test_through_http(model_path, monkeypatch):
    """A server, clients in a process of their own, and the same prompts offline."""
    for name, value in {"STREAMS": 3, "INPUT_LEN": 12, "OUTPUT_LEN": 8}.items():
        monkeypatch.setattr(http, name, value)
    (share,) = http.run(plan(model_path))
    assert share.name == HTTP_SHARE and share.value > 0
    assert share.value / share.against_value == pytest.approx(share.ratio)

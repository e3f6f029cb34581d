# SPDX-License-Identifier: Apache-2.0
"""`vllm bench kernels`: what it counts, that it compares like with like, and the whole way."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from vllm.benchmarks import kernels
from vllm.benchmarks.kernel_inputs import PagedLayers, SdpaLayers, make_inputs
from vllm.benchmarks.kernels import Shape
from vllm.v1.attention.backends.registry import AttentionBackendEnum

SMALL = dict(num_heads=4, num_kv_heads=2, head_size=16, block_size=8, dtype="float32")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_bytes_and_flops():
    """By hand: 2 requests of 3 new tokens over 5 keys, 4 query and 2 KV heads of 16."""
    shape = Shape(2, 5, 3, **SMALL)
    keys_and_values = 2 * 2 * 5 * 2 * 16 * 4
    queries_and_output = 2 * 2 * 3 * 4 * 16 * 4
    assert shape.nbytes(4) == keys_and_values + queries_and_output
    seen = 3 + 4 + 5
    assert shape.flops == 2 * 2 * (2 * seen * 4 * 16)


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_ATTN"])
@pytest.mark.parametrize("query_len", [1, 3, 21])
def test_both_sides_compute_the_same(name, query_len):
    """Decode, a chunk and a whole prompt; other figures would compare different work."""
    torch.manual_seed(0)
    shape, backend = Shape(2, 21, query_len, **SMALL), AttentionBackendEnum[name].get_class()
    inputs = make_inputs(shape, torch.device("cpu"))
    ours, peer = PagedLayers(shape, backend, inputs, 2), SdpaLayers(shape, inputs, 2)
    for layer in range(2):
        torch.testing.assert_close(ours.run_layer(layer), peer.run_layer(layer), atol=1e-5, rtol=1e-5)


def test_a_kernel_that_is_wrong_is_not_measured():
    shape, backend = Shape(1, 8, 1, **SMALL), AttentionBackendEnum.CPU_ATTN.get_class()
    right = torch.zeros(1, 4, 16)
    for wrong in (right + 1, right * float("nan")):
        with pytest.raises(ValueError, match="CPU_ATTN and torch differ by .*nothing is measured"):
            kernels._check_same(shape, backend, right, wrong)


def test_the_whole_way(tmp_path):
    """JSON and file agree; one result for each pair of sizes; figures are positive."""
    path = tmp_path / "results.json"
    sizes = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "16", "--dtype", "float32"]
    rounds = ["--num-iters", "2", "--num-iters-warmup", "1", "--bandwidth", "20"]
    lengths = ["--context-len", "40", "7", "--batch-size", "1", "3"]
    done = bench(*sizes, *rounds, *lengths, "--json", "--output-json", str(path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads(path.read_text())
    asked = [(r["context_len"], r["batch_size"]) for r in results]
    assert asked == [(40, 1), (40, 3), (7, 1), (7, 3)]
    for result in results:
        assert result["bandwidth_bytes_per_second"] == 20e9
        assert [kernel["name"] for kernel in result["kernels"]] == ["CPU_ATTN", "torch SDPA"]
        assert all(len(k["seconds"]) == 2 and k["median_seconds"] > 0 for k in result["kernels"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-heads", "5", "--num-kv-heads", "2"], "5 is no multiple of --num-kv-heads 2"),
        (["--query-len", "9", "--context-len", "8"], "--query-len must be between"),
        (["--batch-size", "0"], "--batch-size and --context-len"),
        (["--bandwidth", "0"], "--bandwidth more than 0"),
        (["--attention-backend", "XYZ"], "unknown attention backend 'XYZ'; known: TRITON_ATTN"),
        (["--attention-backend", "ROCM_ATTN"], "ROCM_ATTN cannot be used"),
    ],
)
def test_wrong_flags(arguments, message):
    done = bench("--bandwidth", "20", *arguments)
    assert done.returncode != 0 and message in done.stderr
    assert "Traceback" not in done.stderr

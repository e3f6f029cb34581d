# SPDX-License-Identifier: Apache-2.0
"""`vllm bench`: help without torch, wrong flags in one line, and the whole way with a peer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def vllm(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_help_imports_no_torch(name):
    """Guards against a help text that takes seconds."""
    code = (
        "import sys\n"
        f"sys.argv = ['vllm', 'bench', '{name}', '--help=all']\n"
        "from vllm.entrypoints.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout and "--input-len" in done.stdout


def test_bench_alone_lists_the_benchmarks():
    done = vllm("bench")
    assert "latency" in done.stdout and "throughput" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1"),
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["latency", "--peer-cache", "static"], "only with --compare"),
        (
            ["latency", "--compare", "transformers", "--enable-prefix-caching"],
            "--enable-prefix-caching",
        ),
        (["compare", "--resume"], "--output-json"),
        (["compare", "--json", "--markdown"], "give one of them"),
        (["compare", "--time-limit", "0"], "--time-limit must be more than 0"),
        (["compare", "--workload", "b9"], "bart32"),
        (["compare", "--precision", "int8", "--quantization", "int4"], "different things"),
        (["throughput", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["throughput", "--dataset-name", "sonnet"], "random"),
    ],
)
def test_wrong_flags(arguments, message):
    """One line on stderr that names the flag; nothing is loaded for it."""
    done = vllm("bench", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and message in done.stderr


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """A small Llama with random weights and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def common(model_path: str) -> list[str]:
    return ["--model", model_path, "--skip-tokenizer-init", "--dtype", "float32", "--json"]


@pytest.mark.slow
def test_latency_beside_transformers(model_path, tmp_path):
    """Two engines, two processes, one model: the same tokens, every figure there."""
    file = tmp_path / "results.json"
    shape = "--batch-size 1 3 --input-len 9 --output-len 5 --num-iters 2".split()
    peer = "--compare transformers --peer-cache dynamic".split()
    done = vllm("bench", "latency", *common(model_path), *shape, *peer, "--output-json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert json.loads(file.read_text()) == results
    assert [result["num_requests"] for result in results] == [1, 3]
    for result in results:
        assert [engine["name"] for engine in result["engines"]] == ["vllm", "transformers"]
        assert [len(engine["seconds"]) for engine in result["engines"]] == [2, 2]
        ours, peer = result["engines"]
        assert ours["dtype"] == peer["dtype"] == "float32"
        assert ours["num_threads"] == peer["num_threads"]
        # float32: the two run the same model on the same prompts, or they do not.
        assert result["same_first_tokens"] == result["num_requests"]


@pytest.mark.slow
def test_throughput_alone(model_path):
    shape = "--num-prompts 4 --input-len 9 --output-len 5".split()
    done = vllm("bench", "throughput", *common(model_path), *shape)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_requests"] == 4 and result["total_num_tokens"] == 4 * 14
    assert result["tokens_per_second"] == pytest.approx(4 * 14 / result["elapsed_time"])


@pytest.mark.slow
def test_too_long_is_refused(model_path):
    """Exit status 1 and one line that names the flags."""
    done = vllm("bench", "latency", *common(model_path), "--input-len", "228", "--output-len", "29")
    assert done.returncode == 1 and done.stdout == ""
    assert "--input-len 228 and --output-len 29" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_compare(model_path, tmp_path):
    """Two engines that run and one that cannot; the file is enough to go on from and to print."""
    file, chart = tmp_path / "results.json", tmp_path / "chart.svg"
    peers = "--peers transformers upstream --peer-cache dynamic --max-model-len 256".split()
    shape = ["--workload", "s1", "--num-iters", "2", "--output-json", str(file)]
    flags = [*common(model_path), *peers, *shape]
    done = vllm("bench", "compare", *flags, "--plot", str(chart), timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(file.read_text()) == result and "<svg" in chart.read_text()
    assert "--upstream-python" in result["left_out"]["upstream"]
    (task,) = result["tasks"]
    assert task["bound_tokens_per_second"] > 0 and task["bounds"]["read_bytes_per_s"] > 0
    ours, peer = task["engines"]
    assert (ours["engine"], peer["engine"]) == ("vllm", "transformers")
    assert len(ours["seconds"]) == len(peer["first_seconds"]) == 2
    assert peer["same_first_tokens_as_ours"] == 1  # float32, one model
    again = vllm("bench", "compare", *flags, "--resume", timeout=400)
    assert json.loads(again.stdout) == result, again.stderr
    printed = vllm("bench", "compare", "--from-json", str(file), "--markdown")
    assert "| s1 (decode) |" in printed.stdout, printed.stderr


def test_compare_of_a_wrong_file(tmp_path):
    done = vllm("bench", "compare", "--from-json", str(tmp_path / "none.json"))
    assert done.returncode == 1 and done.stdout == ""
    assert "none.json" in done.stderr and done.stderr.count("\n") == 1

# SPDX-License-Identifier: Apache-2.0
"""`vllm chat`, `vllm complete`, `vllm bench serve` and `vllm collect-env`, against a server whose
engine is a script."""

from __future__ import annotations

import json

import pytest

from tests.entrypoints.openai.conftest import FakeServer
from tests.entrypoints.openai.fake_engine import FakeEngine, hello
from tests.entrypoints.test_cli import check_refused, vllm
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.sockets import base_url

KEY = "the-key"


@pytest.fixture(scope="module")
def server():
    with FakeServer(FakeEngine(hello), args=FrontendArgs(api_key=[KEY])) as fake:
        fake.url = base_url(fake.sock)
        yield fake


def client(server, command, *flags, text="", key=KEY):
    code = f"import io; sys.stdin = io.StringIO({text!r})"
    return vllm(command, "--url", f"{server.url}/v1", *flags, code=code, VLLM_API_KEY=key)


def test_complete(server):
    done = client(server, "complete", "-q", "Once", "--max-tokens", "7")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert server.engine.seen[-1][1]["prompt"] == "Once"
    assert server.engine.seen[-1][2].max_tokens == 7
    done = client(server, "complete", text="one\ntwo\n")
    assert done.returncode == 0 and done.stdout.count("hello\n") == 2


def test_chat(server):
    """The conversation grows with each message and answer."""
    done = client(server, "chat", "-q", "Hi", "--system-prompt", "Be brief.")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    prompt = server.engine.seen[-1][1]["prompt"]
    assert "Be brief." in prompt and "Hi" in prompt
    done = client(server, "chat", text="one\ntwo\n")
    assert done.returncode == 0 and done.stdout.count("hello\n") == 2
    prompt = server.engine.seen[-1][1]["prompt"]
    assert [prompt.index(word) for word in ("one", "hello", "two")] == sorted(
        prompt.index(word) for word in ("one", "hello", "two")
    )


def test_errors_are_a_line(server):
    for command in ("chat", "complete"):
        wrong = client(server, command, "-q", "x", key="wrong")
        check_refused(wrong, 1, f"vllm {command}: error: 401", "API key")
        unknown = client(server, command, "-q", "x", "--model-name", "nobody")
        assert unknown.returncode == 1 and "does not exist" in unknown.stderr.splitlines()[-1]
        nowhere = vllm(command, "--url", "http://127.0.0.1:9/v1", "-q", "x")
        check_refused(nowhere, 1, "cannot reach", "--url")


def bench(server, *flags, key=KEY):
    return vllm(
        "bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--random-input-len",
        "10", "--random-output-len", "2", "--disable-tqdm", *flags, OPENAI_API_KEY=key,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(server, backend, tmp_path):
    """Upstream's figures, from requests as they were asked for; the first one is a try."""
    del server.engine.seen[:]
    done = bench(
        server, "--backend", backend, "--max-concurrency", "3", "--metric-percentiles", "50,99",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "ttft:1000000", "--save-result",
        "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json",
        "--num-warmups", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        "Successful requests:                     6",
        "Failed requests:                         0",
        "Maximum request concurrency:             3",
        "Total generated tokens:                  12",
        "Request goodput (req/s):", "Request throughput (req/s):",
        "Output token throughput (tok/s):", "Total token throughput (tok/s):",
        "Mean TTFT (ms):", "Median TPOT (ms):", "P50 ITL (ms):", "P99 E2EL (ms):",
    ):  # fmt: skip
        assert words in done.stdout, done.stdout
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["completed"] == 6 and figures["output_lens"] == [2] * 6
    assert figures["max_concurrent_requests"] <= 3
    seen = server.engine.seen
    assert len(seen) == 1 + 2 + 6 and all(params.ignore_eos for _, _, params, _ in seen)
    lengths = [len(prompt["prompt_token_ids"]) for _, prompt, _, _ in seen]
    assert sum(figures["input_lens"]) == sum(lengths[3:])
    if backend == "openai":
        assert set(lengths) == {10}


def test_bench_serve_is_reproducible(server):
    """The same seed the same prompts, another one others."""

    def prompts(seed: str) -> list[list[int]]:
        del server.engine.seen[:]
        flags = ("--seed", seed, "--random-range-ratio", "0.5", "--random-prefix-len", "3")
        assert bench(server, *flags, "--ready-check-timeout-sec", "0").returncode == 0
        return sorted(prompt["prompt_token_ids"] for _, prompt, _, _ in server.engine.seen)

    first = prompts("1")
    assert first == prompts("1") != prompts("2")
    assert len({tuple(prompt[:3]) for prompt in first}) == 1
    assert all(8 <= len(prompt) <= 18 for prompt in first) and len(set(map(len, first))) > 1


def test_bench_serve_errors(server):
    """What cannot be measured is said in a line; a request that is refused is no figure."""
    nowhere = vllm("bench", "serve", "--port", "9")
    check_refused(nowhere, 1, "127.0.0.1:9", "is the server up")
    check_refused(bench(server, key="wrong"), 1, "/v1/models answers 401")
    refused = bench(server, "--random-input-len", "1000")
    assert refused.returncode == 1 and "400: " in refused.stderr.splitlines()[-1]
    refused = bench(server, "--random-input-len", "1000", "--ready-check-timeout-sec", "0")
    assert refused.returncode == 1 and "6 of 6 requests failed" in refused.stderr
    for flags, words in (
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--request-rate", "0"], "--request-rate"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--percentile-metrics", "x"], "'x' is none of ttft"),
        (["--metric-percentiles", "101"], "percentiles"),
        (["--goodput", "itl:5"], "limit"),
        (["--save-detailed"], "--save-result"),
        (["--dataset-name", "sharegpt"], "'random'"),
        (["--header", "x"], "KEY=VALUE"),
    ):
        check_refused(vllm("bench", "serve", *flags), 2, words)


def test_collect_env():
    """Versions and devices; no secrets."""
    done = vllm("collect-env", VLLM_API_KEY="very-secret", VLLM_LOGGING_LEVEL="DEBUG")
    assert done.returncode == 0, done.stderr
    for words in ("Python", "torch", "cores", "platform", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY"):
        assert words in done.stdout
    assert "very-secret" not in done.stdout and "not available" not in done.stdout

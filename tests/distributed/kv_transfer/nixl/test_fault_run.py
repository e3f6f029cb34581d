# SPDX-License-Identifier: Apache-2.0
"""Requests through the proxy while the prefill server is killed and started again and clients hang up
at random: every request ends, with its own tokens, and no page stays behind."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.models.tiny import NATIVE, VOCAB_SIZE, generate, make_model

from vllm.entrypoints.sockets import create_server_socket

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
NUM_REQUESTS = 200
NUM_PROMPTS = 20
NUM_TOKENS = 10
NUM_KILLS = 3
LEASE_S = 4
TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "lease_seconds": LEASE_S, "heartbeat_seconds": 1, "timeout_seconds": 5,
    },
}  # fmt: skip


class Server:
    """A `vllm serve` of the model that can be killed and started again."""

    def __init__(self, model: Path, port: int, side_channel: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            *VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128",
            "--kv-cache-memory-bytes", str(4 << 20), "--kv-transfer-config", json.dumps(TRANSFER),
        ]  # fmt: skip
        self._env = {
            **os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "VLLM_DEBUG_CHECK_INTEGRITY": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._log = log.open("a")

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env=self._env, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip

    def wait_until_healthy(self) -> None:
        for _ in range(1200):
            assert self._process.poll() is None, "the server has ended"
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        pytest.fail(f"{self.url} never became healthy")

    def kill(self) -> None:
        """At once, its engine too: nobody is told."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def proxy_before(prefill: str, decode: str, port: int, log: Path):
    command = [*VLLM, "disagg-proxy", "--prefill", prefill, "--decode", decode]
    with log.open("a") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def free_port(*offsets: int) -> int:
    for port in range(23000, 40000, 11):
        try:
            for offset in offsets:
                create_server_socket("127.0.0.1", port + offset).close()
        except OSError:
            continue
        return port
    pytest.fail("no free ports")


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], hangs_up: bool):
    """The tokens; None if the client hung up, or the error's status."""
    body = {
        "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    timeout = httpx.Timeout(120, read=random.uniform(0.01, 0.5) if hangs_up else 120)
    try:
        response = await client.post(f"{url}/v1/completions", json=body, timeout=timeout)
    except httpx.ReadTimeout:
        assert hangs_up, "a request never ended"
        return None
    if response.status_code != 200:
        return response.status_code
    return response.json()["choices"][0]["token_ids"]


async def run_requests(url: str, prompts: list[list[int]], prefill: Server):
    """All requests, eight at a time, in as many parts as the prefill server has lives: it is killed
    amidst each part but the last, and is back before the next."""
    rng = random.Random(0)
    seats = asyncio.Semaphore(8)
    num_per_life = NUM_REQUESTS // (NUM_KILLS + 1)
    answers: list[tuple[list[int], object]] = []

    async def one(client: httpx.AsyncClient, prompt: list[int], hangs_up: bool) -> None:
        async with seats:
            answers.append((prompt, await ask(client, url, prompt, hangs_up)))

    async with httpx.AsyncClient() as client:
        for life in range(NUM_KILLS + 1):
            num_before = len(answers)
            tasks = [
                asyncio.create_task(one(client, rng.choice(prompts), rng.random() < 0.2))
                for _ in range(num_per_life)
            ]
            if life < NUM_KILLS:
                while len(answers) < num_before + num_per_life // 2:
                    await asyncio.sleep(0.005)
                prefill.kill()
                await asyncio.sleep(rng.uniform(0, 0.5))
                prefill.start()
                await asyncio.to_thread(prefill.wait_until_healthy)
            await asyncio.gather(*tasks)
    return answers


def test_kills_and_aborts(tmp_path):
    model = make_model(NATIVE["llama"], tmp_path / "model")
    rng = random.Random(1)
    prompts = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([5, 16, 17, 40, 70]))]
        for _ in range(NUM_PROMPTS)
    ]
    expected = {tuple(p): answer for p, answer in zip(prompts, generate(model, prompts, NUM_TOKENS))}
    port = free_port(0, 1, 2, 3, 4)
    prefill = Server(tmp_path / "model", port, port + 3, tmp_path / "prefill.log")
    decode = Server(tmp_path / "model", port + 1, port + 4, tmp_path / "decode.log")
    with ExitStack() as stack:
        for server in (prefill, decode):
            server.start()
            stack.callback(server.kill)
        for server in (prefill, decode):
            server.wait_until_healthy()
        log = tmp_path / "proxy.log"
        url = stack.enter_context(proxy_before(prefill.url, decode.url, port + 2, log))
        for _ in range(300):
            try:
                if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        answers = asyncio.run(run_requests(url, prompts, prefill))
        wrong = [(p, a) for p, a in answers if a is not None and a != expected[tuple(p)]]
        assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:3]}"
        assert len(answers) == NUM_REQUESTS
        # Each life of the prefill server has served some.
        connections = (tmp_path / "decode.log").read_text().count("NIXL: connected to engine")
        assert connections == NUM_KILLS + 1
        assert decode.metric("vllm:nixl_bytes_transferred_count") > NUM_REQUESTS // 8
        for server in (prefill, decode):
            for _ in range(300):  # Leases of what nobody came for run out.
                if server.metric("vllm:kv_cache_usage_perc") == 0:
                    break
                time.sleep(0.2)
            assert server.metric("vllm:kv_cache_usage_perc") == 0
            assert server.metric("vllm:num_requests_running") == 0
            assert server.metric("vllm:num_requests_waiting") == 0
            assert httpx.get(f"{server.url}/health").status_code == 200

# SPDX-License-Identifier: Apache-2.0
"""`examples/disaggregation.py`, as a user runs it: one command, two servers and a proxy; what comes
through the proxy is what a server alone says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from vllm.entrypoints.sockets import create_server_socket

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPT = (
    "The lighthouse keeper wrote down the weather every morning: wind, cloud, rain, and the colour "
    "of the sea. In 1887 a storm broke"
)


def free_ports(*offsets: int) -> int:
    """A port that is free, and so are those that far behind it."""
    for port in range(21000, 40000, 7):
        try:
            for offset in offsets:
                create_server_socket("127.0.0.1", port + offset).close()
        except OSError:
            continue
        return port
    pytest.fail("no free ports")


@contextmanager
def example(connector: str) -> Iterator[str]:
    """The proxy's URL, once it answers."""
    port = free_ports(0, 100, 200)
    side_channel = free_ports(300, 301) + 300
    command = [sys.executable, str(ROOT / "examples" / "disaggregation.py")]
    command += ["--connector", connector, "--port", str(port)]
    command += ["--side-channel-port", str(side_channel), "--", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(32 << 20), "--dtype", "float32"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(240, process.terminate)
    watchdog.start()
    try:
        assert any(line.startswith("curl") for line in process.stdout), "it has ended"
        # Nobody reads on: what else is said must not block it.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        watchdog.cancel()
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("connector", ["files", "nixl"])
def test_one_command(connector):
    if connector == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with example(connector) as url, httpx.Client(timeout=120) as client:
        through = client.post(f"{url}/v1/completions", json=body).json()
        base, port = url.rsplit(":", 1)
        prefill, decode = (f"{base}:{int(port) + offset}" for offset in (100, 200))
        alone = client.post(f"{prefill}/v1/completions", json=body).json()
        assert through["choices"][0]["text"] == alone["choices"][0]["text"]
        metrics = client.get(f"{decode}/metrics").text
        cached = next(
            line for line in metrics.splitlines()
            if line.startswith("vllm:prompt_tokens_cached_total")
        )  # fmt: skip
        assert float(cached.split()[-1]) == through["usage"]["prompt_tokens"] - 1
        check_openai_client(url, prefill)


def check_openai_client(url: str, alone: str) -> None:
    """What its users do goes through the proxy as to one server: answers, streams, and errors, which
    it raises as what they are."""
    through, one = (
        openai.OpenAI(base_url=f"{base}/v1", api_key="-", max_retries=0) for base in (url, alone)
    )
    model = through.models.list().data[0].id
    plain = dict(model=model, prompt=PROMPT + " again, and", max_tokens=12, temperature=0)
    expected = one.completions.create(**plain)
    answer = through.completions.create(**plain)
    assert (answer.choices, answer.usage) == (expected.choices, expected.usage)
    parts = list(through.completions.create(stream=True, **plain))
    assert "".join(part.choices[0].text for part in parts) == expected.choices[0].text
    messages = [{"role": "user", "content": "Tell me about the sea, and about ships."}]
    chat = dict(model=model, messages=messages, max_tokens=12, temperature=0)
    said = one.chat.completions.create(**chat).choices[0].message
    assert through.chat.completions.create(**chat).choices[0].message == said
    parts = list(through.chat.completions.create(stream=True, **chat))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said.content
    for fields, error in [
        ({"model": "another"}, openai.NotFoundError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"prompt": PROMPT * 100}, openai.BadRequestError),
        ({"extra_body": {"kv_transfer_params": {"a": 1}}}, openai.BadRequestError),
    ]:
        for stream in (False, True):
            with pytest.raises(error):
                through.completions.create(stream=stream, **plain | fields)

# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a process, with the embedded model, and the `openai` client as its user."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from vllm.transformers_utils.embedded import find_embedded_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed"),
]
KEY = "test-key"
TEXT = "The capital of France is"


class ServerProcess:
    """`vllm serve` on a free port; `log` is what it has printed so far."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--host", "127.0.0.1",
             "--port", "0", "--api-key", KEY, "--max-model-len", "1024", "--dtype", "float32",
             "--kv-cache-memory-bytes", "256M", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.log = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(300)
        match = re.search(r"ready on (http://\S+);", self.log)
        assert match, self.log
        self.url = match[1]
        headers = {"Authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=300)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=300)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.log += line
            if "ready on" in line:
                self._ready.set()
        self._ready.set()

    def gauges(self) -> dict[str, float]:
        """Requests that run and wait, as /metrics says."""
        text = self.client.get("/metrics").text
        pattern = r"^vllm:(num_requests_running|num_requests_waiting)\{.*\} (\S+)$"
        return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}

    def engine_pid(self) -> int:
        """The one child of the server."""
        pid = self.process.pid
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
        (engine,) = [int(child) for child in children if _is_engine(child)]
        return engine

    def wait(self) -> int:
        """The exit status."""
        status = self.process.wait(120)
        self._reader.join(10)
        return status

    def stop(self) -> None:
        """Ends it, however it is."""
        self.process.kill() if self.process.poll() is None else None
        self.process.wait()
        self.client.close()


def _is_engine(pid: str) -> bool:
    return b"core_main" in open(f"/proc/{pid}/cmdline", "rb").read()


def eventually(condition, what: str) -> None:
    """Not a timed test: the bound only keeps a broken one from hanging."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"never happened: {what}")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Shared by the tests that leave it as it was."""
    started = ServerProcess()
    yield started
    started.stop()


@pytest.fixture
def own_server() -> Iterator[ServerProcess]:
    """For a test that ends it."""
    started = ServerProcess("--shutdown-timeout", "100")
    yield started
    started.stop()


def idle(server: ServerProcess) -> bool:
    gauges = server.gauges()
    return len(gauges) == 2 and not any(gauges.values())


def test_openai_client_completion(server):
    """Greedy text of the embedded model: the engine answers, not something that stands in for it."""
    (model,) = server.openai.models.list().data
    answer = server.openai.completions.create(
        model=model.id, prompt=TEXT, max_tokens=8, temperature=0
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.model == model.id


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"stop": ["."]}, {"n": 2, "seed": 1}])
def test_completion_stream_equals_whole(server, extra):
    """The same text, logprobs and reasons, in pieces or not."""
    model = server.openai.models.list().data[0].id
    asked = {"model": model, "prompt": [TEXT, "Once upon a time"], "max_tokens": 16, **extra}
    asked["temperature"] = 0.8 if "n" in extra else 0
    whole = server.openai.completions.create(**asked)
    pieces: dict[int, list] = {}
    for chunk in server.openai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces.setdefault(choice.index, []).append(choice)
    assert sorted(pieces) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        own = pieces[choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        if "logprobs" in extra:
            tokens = [token for piece in own for token in piece.logprobs.tokens]
            assert tokens == choice.logprobs.tokens and "".join(tokens) == choice.text
            assert len(choice.logprobs.token_logprobs) == 16
            assert all(value <= 0 for value in choice.logprobs.token_logprobs)
            assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)


def test_chat_stream_equals_whole(server):
    """Also for chat, with usage."""
    model = server.openai.models.list().data[0].id
    asked = {
        "model": model, "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = server.openai.chat.completions.create(**asked)
    stream = server.openai.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    own = [chunk.choices[0] for chunk in chunks[:-1]]
    assert own[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in own)
    assert text == whole.choices[0].message.content and text.strip()
    tokens = [entry.token for choice in own if choice.logprobs for entry in choice.logprobs.content]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    assert all(len(e.top_logprobs) == 3 for e in whole.choices[0].logprobs.content)
    assert whole.choices[0].message.role == "assistant"


def test_ids_and_text_agree(server):
    """A prompt as ids is the prompt as text."""
    from vllm.tokenizers import get_tokenizer
    from vllm.transformers_utils.embedded import resolve_model

    ids = get_tokenizer(resolve_model(None)).encode(TEXT)
    asked = {"max_tokens": 8, "temperature": 0, "prompt_logprobs": 1}
    as_text = server.client.post("/v1/completions", json={"prompt": TEXT, **asked}).json()
    as_ids = server.client.post("/v1/completions", json={"prompt": ids, **asked}).json()
    first, second = as_text["choices"][0], as_ids["choices"][0]
    assert first["text"] == second["text"]
    assert [p and sorted(p) for p in first["prompt_logprobs"]] == [
        p and sorted(p) for p in second["prompt_logprobs"]
    ]
    assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == len(ids)


def test_stop_and_length(server):
    """Why a completion ended, and on what."""
    asked = {"prompt": TEXT, "temperature": 0, "max_tokens": 24}
    body = server.client.post("/v1/completions", json={**asked, "stop": ["Paris"]}).json()
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Paris")
    assert "Paris" not in choice["text"]
    kept = {**asked, "stop": ["Paris"], "include_stop_str_in_output": True}
    body = server.client.post("/v1/completions", json=kept).json()
    assert body["choices"][0]["text"].endswith("Paris")


def test_seeds(server):
    """The same seed the same text, whatever else is asked for; another seed another one."""
    asked = {"prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 12}

    def text(seed: int) -> str:
        answer = server.client.post("/v1/completions", json={**asked, "seed": seed})
        return answer.json()["choices"][0]["text"]

    assert text(1) == text(1) and len({text(seed) for seed in (1, 2, 3, 4)}) > 1


def test_errors_of_the_openai_client(server):
    """The client raises what it raises for OpenAI's own servers."""
    model = server.openai.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="prompt"):
        server.openai.completions.create(model=model, prompt="")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.openai.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        server.openai.completions.create(model=model, prompt="x", max_tokens=5000)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        stranger.models.list()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_errors_touch_no_neighbour(server):
    """A request that runs beside bad ones says what it says alone."""
    asked = {"prompt": TEXT, "temperature": 0, "max_tokens": 48}
    alone = server.client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    answers: list[str] = []

    def good() -> None:
        body = httpx.post(
            f"{server.url}/v1/completions", json=asked, timeout=300,
            headers={"Authorization": f"Bearer {KEY}"},
        ).json()  # fmt: skip
        answers.append(body["choices"][0]["text"])

    thread = threading.Thread(target=good)
    thread.start()
    bad = ["", [""], [], [[]], [-1], [10**6], [5] * 1024, "word " * 3000, 5, None]
    while thread.is_alive():
        for prompt in bad:
            assert server.client.post("/v1/completions", json={"prompt": prompt}).status_code == 400
    assert answers == [alone]
    eventually(lambda: idle(server), "gauges at zero")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_empties_the_engine(server, stream):
    """Clients that leave take their requests with them: every gauge is back at zero, long before
    those requests would have ended."""
    asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        with server.client.stream(
            "POST", "/v1/completions", json=asked, timeout=httpx.Timeout(60, read=1.0)
        ) as response:
            for _ in response.iter_raw():
                eventually(lambda: server.gauges()["num_requests_running"] == 4, "all run")
                raise httpx.ReadTimeout("enough")
    eventually(lambda: idle(server), "gauges at zero")
    generated = _counter(server, "generation_tokens_total")
    time.sleep(0.5)
    assert _counter(server, "generation_tokens_total") == generated


def _counter(server: ServerProcess, name: str) -> float:
    text = server.client.get("/metrics").text
    return float(re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])


def test_two_hundred_streams(server):
    """Each asks for its own number back: none is lost, none gets another's, nothing is left over."""
    numbers = list(range(100, 900, 4))
    examples = "Copy the number.\n582 -> 582\n903 -> 903\n147 -> 147\n"

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        asked = {"prompt": f"{examples}{number} ->", "max_tokens": 8, "temperature": 0,
                 "stop": ["\n"], "stream": True}  # fmt: skip
        text, last = "", ""
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert last == "data: [DONE]"
        return text.strip()

    async def ask_all() -> list[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=len(numbers))
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, limits=limits, timeout=300
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in numbers))

    assert asyncio.run(ask_all()) == [str(number) for number in numbers]
    eventually(lambda: idle(server), "gauges at zero")


def test_the_curl_line(server):
    """What the log offers to paste works (with the key in the environment)."""
    line = re.search(r"try: (curl .*)$", server.log, re.MULTILINE)[1]
    ran = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=120,
        env={**os.environ, "VLLM_API_KEY": KEY},
    )  # fmt: skip
    assert json.loads(ran.stdout)["choices"][0]["text"], ran.stdout + ran.stderr


def _stream_in_thread(server: ServerProcess, max_tokens: int) -> tuple[threading.Thread, list[str]]:
    got: list[str] = []

    def read() -> None:
        asked = {"prompt": TEXT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=asked, timeout=300,
            headers={"Authorization": f"Bearer {KEY}"},
        ) as response:  # fmt: skip
            try:
                got.extend(response.iter_lines())
            except httpx.RemoteProtocolError as error:
                got.append(repr(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    eventually(lambda: server.gauges().get("num_requests_running") == 1, "request runs")
    return thread, got


def test_sigterm_drains(own_server):
    """The running stream to its last token, then status 0 and nothing left behind."""
    engine = own_server.engine_pid()
    thread, got = _stream_in_thread(own_server, max_tokens=60)
    own_server.process.send_signal(signal.SIGTERM)
    thread.join(120)
    data = [line for line in got if line]
    assert data[-1] == "data: [DONE]" and '"finish_reason":"length"' in data[-2]
    assert own_server.wait() == 0, own_server.log
    assert not os.path.exists(f"/proc/{engine}")
    assert "Traceback" not in own_server.log


def test_killed_engine(own_server):
    """Every waiting request is told, with a status or an event; /health says 503 until the server
    ends with status 1."""
    thread, got = _stream_in_thread(own_server, max_tokens=1000)
    statuses: list[int] = []
    url, headers = f"{own_server.url}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    asked = {"prompt": TEXT, "max_tokens": 1000, "ignore_eos": True}

    def ask() -> None:
        statuses.append(httpx.post(url, json=asked, headers=headers, timeout=300).status_code)

    waiting = [threading.Thread(target=ask) for _ in range(3)]
    for each in waiting:
        each.start()
    eventually(lambda: own_server.gauges()["num_requests_running"] == 4, "requests run")
    os.kill(own_server.engine_pid(), signal.SIGKILL)
    health: list[int] = []

    def unhealthy() -> bool:
        try:
            health.append(httpx.get(f"{own_server.url}/health", timeout=60).status_code)
        except httpx.HTTPError:
            return True
        return health[-1] == 503

    eventually(unhealthy, "unhealthy")
    for each in (*waiting, thread):
        each.join(120)
    assert statuses == [500] * 3
    data = [line for line in got if line]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2].removeprefix("data: "))["error"]["code"] == 500
    assert own_server.wait() == 1
    assert 503 in health
    assert "the engine is dead" in own_server.log


def test_second_signal(own_server):
    """Ctrl-C twice ends it at once; the engine's process goes too."""
    engine = own_server.engine_pid()
    _stream_in_thread(own_server, max_tokens=1000)
    own_server.process.send_signal(signal.SIGINT)
    eventually(lambda: "shutting down" in own_server.log, "drains")
    own_server.process.send_signal(signal.SIGINT)
    assert own_server.wait() == 128 + signal.SIGINT
    assert not os.path.exists(f"/proc/{engine}")

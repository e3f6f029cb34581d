# SPDX-License-Identifier: Apache-2.0
"""One address before prefill and decode servers: what a client sees, and what the servers get."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import httpx
import pytest

from tests.entrypoints.openai.conftest import FakeServer, events
from tests.entrypoints.openai.fake_engine import FakeEngine, Script, forever, hello, never, piece
from vllm.entrypoints.cli.main import _main
from vllm.entrypoints.disagg_proxy import build_proxy
from vllm.entrypoints.launcher import make_server
from vllm.entrypoints.sockets import base_url, create_server_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 7},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7},
}
REMOTE_DECODE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Proxy:
    """The proxy in a thread; `client` talks to it."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._app = build_proxy(prefill, decode)

    def __enter__(self) -> Proxy:
        ready = threading.Event()
        self._sock = create_server_socket("127.0.0.1", 0)
        self._server = make_server(
            self._app, on_ready=ready.set, drain_timeout_s=5, log_level="warning"
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert ready.wait(60)
        self.client = httpx.Client(base_url=base_url(self._sock), timeout=60)
        return self

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._sock]))

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._sock.close()


class Setup:
    """Servers that answer by script, and a proxy before them."""

    def __init__(self, stack: ExitStack, prefill: list[Script], decode: list[Script]) -> None:
        self.prefill = [stack.enter_context(FakeServer(FakeEngine(script))) for script in prefill]
        self.decode = [stack.enter_context(FakeServer(FakeEngine(script))) for script in decode]
        urls = [[str(s.client.base_url) for s in kind] for kind in (self.prefill, self.decode)]
        self.client = stack.enter_context(Proxy(*urls)).client

    @property
    def num_seen(self) -> tuple[int, int]:
        """Requests that prefill and decode servers have got."""
        return tuple(
            sum(len(s.engine.seen) for s in kind) for kind in (self.prefill, self.decode)
        )


@pytest.fixture
def start() -> Iterator[Callable[..., Setup]]:
    with ExitStack() as stack:
        yield lambda prefill=(hello,), decode=(hello,): Setup(stack, list(prefill), list(decode))


def dead_url() -> str:
    """Nobody listens there."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def wait_until(condition, what: str) -> None:
    """Not a timed test: the bound only keeps a broken one from hanging."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail(f"never happened: {what}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_both_ways(start, path, stream):
    """Prefill is asked for one token, without a stream, and to keep its pages; decode gets the whole
    request and what prefill answered; the client gets decode's answer."""
    setup = start()
    body = {**BODIES[path], "stream": stream, "temperature": 0.5, "stop": ["x"]}
    response = setup.client.post(path, json=body)
    assert response.status_code == 200, response.text
    if stream:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert chunks[-1] == "[DONE]"
        choices = [c for chunk in chunks[:-1] for c in json.loads(chunk)["choices"]]
        texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
        assert "".join(texts) == "hello"
    else:
        choice = response.json()["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == "hello"
    (_, _, prefill, _), = setup.prefill[0].engine.seen
    assert prefill.max_tokens == 1
    assert prefill.extra_args == {"kv_transfer_params": REMOTE_DECODE}
    (request_id, _, decode, _), = setup.decode[0].engine.seen
    assert decode.max_tokens == 7 and decode.temperature == 0.5 and decode.stop == ["x"]
    # The stand-in for a connector answers with the question.
    assert decode.extra_args == {"kv_transfer_params": REMOTE_DECODE}
    assert setup.prefill[0].engine.seen[0][0].split("-")[1] == request_id.split("-")[1]


def test_fields_that_one_token_does_not_go_with(start):
    """min_tokens above 1, logprobs and the like would be refused, or computed for nothing."""
    setup = start()
    body = {"min_tokens": 5, "logprobs": 3, "stream_options": {"include_usage": True}, "stream": True}
    assert setup.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **body}).status_code == 200
    chat = {"logprobs": True, "top_logprobs": 2, "min_tokens": 3}
    assert setup.client.post(CHAT, json={**BODIES[CHAT], **chat}).status_code == 200
    assert setup.num_seen == (2, 2)
    assert all(seen[2].logprobs is None for seen in setup.prefill[0].engine.seen)
    assert [seen[2].logprobs for seen in setup.decode[0].engine.seen] == [3, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1.0}, {"prompt": ["a", "b"]}, {"prompt": [[5], [6]]},
        {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0},
    ],
)  # fmt: skip
def test_what_cannot_be_split_goes_to_decode_alone(start, fields):
    """It is answered all the same: a decode server can do everything."""
    setup = start()
    response = setup.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **fields})
    assert response.status_code == 200, response.text
    assert setup.num_seen[0] == 0 and setup.num_seen[1] >= 1
    assert setup.decode[0].engine.seen[0][2].extra_args is None


def test_one_prompt_in_a_list(start):
    """A list of one text is one prompt."""
    setup = start()
    body = {**BODIES[COMPLETIONS], "prompt": ["hi"]}
    assert setup.client.post(COMPLETIONS, json=body).status_code == 200
    assert setup.num_seen == (1, 1)


def test_servers_take_turns(start):
    setup = start([hello, hello], [hello, hello, hello])
    for _ in range(6):
        assert setup.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 200
    assert [len(server.engine.seen) for server in setup.prefill] == [3, 3]
    assert [len(server.engine.seen) for server in setup.decode] == [2, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("script", [never, forever], ids=["waiting", "running"])
def test_who_hangs_up_is_aborted(start, which, stream, script):
    """In either server: a request that nobody waits for must leave the engine."""
    scripts = {"prefill": hello, "decode": hello} | {which: script}
    setup = start([scripts["prefill"]], [scripts["decode"]])
    body = {**BODIES[COMPLETIONS], "stream": stream, "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        timeout = httpx.Timeout(60, read=0.5)
        with setup.client.stream("POST", COMPLETIONS, json=body, timeout=timeout) as response:
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("enough")
    engine = getattr(setup, which)[0].engine
    wait_until(lambda: engine.aborted and not engine.running, "abort")
    if which == "prefill":
        assert setup.num_seen == (1, 0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
        (b'{"prompt": "a", "model": "nobody"}', 404, "nobody"),
        (b'{"prompt": "a", "kv_transfer_params": {"a": 1}}', 400, "set by this proxy"),
    ],
)
def test_errors_are_openai_s(start, body, status, words):
    """The proxy's own and the servers', which are passed on as they are."""
    setup = start()
    response = setup.client.post(COMPLETIONS, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert words in error["message"] and error["code"] == status and error["type"]
    assert setup.num_seen == (0, 0)


def test_unknown_route(start):
    response = start().client.get("/v1/nothing")
    assert response.status_code == 404 and "/v1/nothing" in response.json()["error"]["message"]


def test_prefill_is_gone(start):
    """Decode computes the prompt itself: slower is better than no answer."""
    with ExitStack() as stack:
        decode = stack.enter_context(FakeServer(FakeEngine(hello)))
        proxy = stack.enter_context(Proxy([dead_url()], [str(decode.client.base_url)]))
        response = proxy.client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
        assert response.status_code == 200
        assert decode.engine.seen[0][2].extra_args is None
        assert proxy.client.get("/health").status_code == 503


def test_one_decode_server_is_gone(start):
    """The other one answers, whoever's turn it is."""
    with ExitStack() as stack:
        prefill = stack.enter_context(FakeServer(FakeEngine(hello)))
        decode = stack.enter_context(FakeServer(FakeEngine(hello)))
        urls = [dead_url(), str(decode.client.base_url)]
        proxy = stack.enter_context(Proxy([str(prefill.client.base_url)], urls))
        for _ in range(4):
            assert proxy.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 200
        assert proxy.client.get("/v1/models").status_code == 200
        health = proxy.client.get("/health")
        assert health.status_code == 200 and set(health.json()["decode"].values()) == {True, False}


@pytest.mark.parametrize("stream", [False, True])
def test_no_decode_server_is_there(stream):
    """502, whatever kind of answer was asked for."""
    with ExitStack() as stack:
        prefill = stack.enter_context(FakeServer(FakeEngine(hello)))
        proxy = stack.enter_context(Proxy([str(prefill.client.base_url)], [dead_url()]))
        response = proxy.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": stream})
        assert response.status_code == 502
        assert "no server can be reached" in response.json()["error"]["message"]


def test_decode_fails_in_its_stream(start):
    """The server's own error event is passed on; the stream ends as streams end."""

    async def fails(token_ids, params):
        yield [piece(0, "hel", [5])]
        raise ValueError("the model has had enough")

    setup = start(decode=[fails])
    response = setup.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True})
    chunks = events(response.text)
    assert "had enough" in json.loads(chunks[-2])["error"]["message"] and chunks[-1] == "[DONE]"


def test_decode_dies_in_its_stream():
    """A stream that breaks off must not look like one that ended."""

    def die(sock: socket.socket) -> None:
        connection, _ = sock.accept()
        connection.recv(1 << 16)
        event = b'data: {"choices": []}\n\n'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))
        connection.close()

    with ExitStack() as stack:
        prefill = stack.enter_context(FakeServer(FakeEngine(hello)))
        sock = stack.enter_context(create_server_socket("127.0.0.1", 0))
        thread = threading.Thread(target=die, args=(sock,))
        thread.start()
        proxy = stack.enter_context(Proxy([str(prefill.client.base_url)], [base_url(sock)]))
        response = proxy.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True})
        thread.join(60)
    chunks = events(response.text)
    assert "broke off" in json.loads(chunks[-2])["error"]["message"] and chunks[-1] == "[DONE]"


def test_the_key_is_passed_on():
    """Servers that ask for a key get the client's."""
    from vllm.entrypoints.openai.cli_args import FrontendArgs

    with ExitStack() as stack:
        kinds = [
            stack.enter_context(FakeServer(FakeEngine(hello), args=FrontendArgs(api_key=["k"])))
            for _ in range(2)
        ]
        proxy = stack.enter_context(Proxy(*([str(s.client.base_url)] for s in kinds)))
        body = BODIES[COMPLETIONS]
        assert proxy.client.post(COMPLETIONS, json=body).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert proxy.client.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        assert proxy.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("url", ["localhost:8100", "ftp://a", "http://"])
def test_command_line_refuses_what_is_no_url(url, capsys):
    with pytest.raises(SystemExit) as caught:
        _main(["disagg-proxy", "--prefill", url, "--decode", "http://localhost:1"])
    assert caught.value.code == 2
    assert f"{url!r} is no URL such as http://localhost:8100" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""Who leaves takes his request with him; a server that is told to stop finishes what it began; a
dead engine is noticed; and nobody passes without a key."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from tests.entrypoints.openai.fake_engine import forever, never, piece
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.middleware import LIVENESS_PATHS
from vllm.v1.engine.exceptions import EngineDeadError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}


def wait_until(condition, what: str) -> None:
    """Not a timed test: the bound only keeps a broken one from hanging."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail(f"never happened: {what}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("script", [never, forever], ids=["waiting", "running"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(serve, path, script, stream):
    """Queued or running, streaming or not: a request nobody waits for must leave the engine."""
    fake = serve(script)
    with pytest.raises(httpx.ReadTimeout):
        with fake.client.stream(
            "POST", path, json={**BODY, "stream": stream}, timeout=httpx.Timeout(60, read=0.3)
        ) as response:
            for _ in response.iter_raw():
                if script is forever:
                    raise httpx.ReadTimeout("enough")
    wait_until(lambda: fake.engine.aborted and not fake.engine.running, "abort")
    assert fake.client.get("/health").status_code == 200


def test_disconnect_aborts_every_prompt(serve):
    """A request of several prompts is several requests of the engine."""
    fake = serve(never)
    with pytest.raises(httpx.ReadTimeout):
        fake.client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}, timeout=0.3)
    wait_until(lambda: len(fake.engine.aborted) == 3 and not fake.engine.running, "abort")


def test_a_neighbour_goes_on(serve):
    """One client's leaving is nothing to another's request."""
    release = threading.Event()

    async def script(token_ids, params):
        yield [piece(0, "a", [5])]
        if len(token_ids) == 1:
            await asyncio.Event().wait()
        while not release.is_set():
            await asyncio.sleep(0.01)
        yield [piece(0, "b", [6], "stop")]

    fake = serve(script)
    with fake.client.stream("POST", COMPLETIONS, json={"prompt": [5, 6], "stream": True}) as stays:
        with fake.client.stream("POST", COMPLETIONS, json={"prompt": [5], "stream": True}):
            pass
        wait_until(lambda: fake.engine.aborted, "abort")
        release.set()
        text = "".join(stays.iter_text())
    assert '"text":"b"' in text and text.endswith("data: [DONE]\n\n")
    assert len(fake.engine.aborted) == 1


def _blocked(release: threading.Event):
    async def script(token_ids, params):
        yield [piece(0, "a", [5])]
        while not release.is_set():
            await asyncio.sleep(0.01)
        yield [piece(0, "b", [6], "stop")]

    return script


def _start_stream(fake) -> tuple[threading.Thread, list[str]]:
    got: list[str] = []

    def read() -> None:
        try:
            with httpx.stream(
                "POST", f"{fake.client.base_url}{COMPLETIONS}", json={**BODY, "stream": True},
                timeout=60,
            ) as response:  # fmt: skip
                for text in response.iter_text():
                    got.append(text)
        except httpx.HTTPError as error:
            got.append(repr(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_until(lambda: got, "first event")
    return thread, got


def test_drain(serve):
    """Told to stop: no new connection, the running request to its end, status 0."""
    release = threading.Event()
    fake = serve(_blocked(release))
    thread, got = _start_stream(fake)
    fake.signal()
    wait_until(lambda: not _accepts(fake), "stops listening")
    release.set()
    thread.join(60)
    assert '"text":"b"' in "".join(got) and got[-1].endswith("data: [DONE]\n\n")
    assert fake.join() == 0


def _accepts(fake) -> bool:
    try:
        httpx.get(f"{fake.client.base_url}/health", timeout=60)
    except httpx.HTTPError:
        return False
    return True


def test_drain_is_bounded(serve):
    """A request that does not end is aborted when its time is up; that is no failure."""
    fake = serve(forever, drain_timeout_s=0)
    thread, _ = _start_stream(fake)
    fake.signal()
    assert fake.join() == 0
    thread.join(60)
    assert fake.engine.aborted and not fake.engine.running


def test_what_is_not_streamed_is_told(serve):
    """A request that waits for its whole answer when the time is up gets a status that it can be
    sent again."""
    fake = serve(never, drain_timeout_s=0)
    answers: list[httpx.Response] = []
    url = f"{fake.client.base_url}{COMPLETIONS}"
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=BODY, timeout=60)))
    thread.start()
    wait_until(lambda: fake.engine.running, "request runs")
    fake.signal()
    assert fake.join() == 0
    thread.join(60)
    assert answers[0].status_code == 503 and "shutting down" in answers[0].json()["error"]["message"]
    assert fake.engine.aborted


def test_second_signal_stops_at_once(serve):
    """Who asks twice does not want to wait; the status says that it was no clean end."""
    fake = serve(forever, drain_timeout_s=600)
    thread, _ = _start_stream(fake)
    fake.signal()
    wait_until(lambda: not _accepts(fake), "stops listening")
    fake.signal()
    assert fake.join() == 128 + 15
    thread.join(60)


def test_dead_engine(serve):
    """Waiting requests fail with 500, /health with 503, and the server ends with status 1."""
    death = threading.Event()

    async def script(token_ids, params):
        while not death.is_set():
            await asyncio.sleep(0.01)
        raise EngineDeadError("test")
        yield

    fake = serve(script)
    answers: list[httpx.Response] = []
    url = f"{fake.client.base_url}{COMPLETIONS}"
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(url, json=BODY, timeout=60)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(fake.engine.running) == 3, "requests run")
    fake.engine.error = EngineDeadError("test")
    death.set()
    fake.engine.death_callback()
    health = fake.client.get("/health")
    assert health.status_code == 503 and health.json()["error"]["code"] == 503
    late = fake.client.post(COMPLETIONS, json=BODY)
    assert late.status_code == 500
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [500] * 3
    assert all("engine" in answer.json()["error"]["message"] for answer in answers)
    assert fake.join() == 1


def test_dead_engine_that_is_kept(serve, monkeypatch):
    """VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: the server stays, unhealthy."""
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    fake = serve()
    fake.engine.error = EngineDeadError("test")
    fake.engine.death_callback()
    time.sleep(1.5)
    assert fake.client.get("/health").status_code == 503


KEYS = FrontendArgs(api_key=["first", "schlüssel"])


def _routes(app) -> list[tuple[str, str]]:
    found = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        pending.extend(getattr(getattr(route, "original_router", None), "routes", []))
        if isinstance(route, Route | APIRoute):
            found.extend((method, route.path) for method in route.methods or ())
    return found


def test_every_route_asks_for_the_key(serve):
    """A walk over all routes: one added later is guarded too, unless it is named as liveness."""
    fake = serve(args=KEYS)
    routes = _routes(fake.app)
    paths = {path for _, path in routes}
    assert {COMPLETIONS, CHAT, "/v1/models", "/metrics", "/version", "/docs"} <= paths
    assert {COMPLETIONS, "/health", "/ping"} <= paths and LIVENESS_PATHS <= paths
    for method, path in [*routes, ("GET", "/nothing"), ("POST", "/health/"), ("GET", "//health")]:
        response = fake.client.request(method, path)
        if path in LIVENESS_PATHS:
            assert response.status_code != 401, (method, path)
            continue
        assert response.status_code == 401, (method, path, response.text)
        if method != "HEAD":
            assert response.json()["error"]["code"] == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert not fake.engine.seen


@pytest.mark.parametrize(
    "header",
    [None, "", "first", "Bearer", "Bearer firs", "Bearer first2", "Bearer FIRST",
     "Basic first", "Bearer first,second", b"Bearer \xff"],
)  # fmt: skip
def test_wrong_keys(serve, header):
    """Nothing but a key itself is a key."""
    fake = serve(args=KEYS)
    headers = {} if header is None else {"Authorization": header}
    assert fake.client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("header", ["Bearer first", "bearer first", "Bearer schlüssel".encode()])
def test_right_keys(serve, header):
    """Each of several keys; the scheme in any case."""
    fake = serve(args=KEYS)
    headers = {"Authorization": header}
    assert fake.client.get("/v1/models", headers=headers).status_code == 200


def test_key_from_the_environment(monkeypatch):
    """VLLM_API_KEY adds a key; empty, it is as if unset."""
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert FrontendArgs(api_key=["a"]).keys == ["a", "env"]
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert FrontendArgs().keys == []


def test_large_body_without_a_key(serve):
    """The key is asked for first: nobody's body is read without one."""
    fake = serve(args=KEYS)
    response = fake.client.post(COMPLETIONS, content=b"x" * (20 << 20))
    assert response.status_code == 401

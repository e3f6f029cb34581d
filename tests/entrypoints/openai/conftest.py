# SPDX-License-Identifier: Apache-2.0
"""Servers over a fake engine, on a real port: what is tested is what a client sees."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, Script, hello
from vllm.entrypoints.launcher import make_server, serve_http
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.sockets import base_url, create_server_socket


@dataclass
class FakeServer:
    """A server in a thread; `client` talks to it."""

    engine: FakeEngine
    args: FrontendArgs = field(default_factory=FrontendArgs)
    drain_timeout_s: int = 20
    status: int | None = None

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self.sock = create_server_socket("127.0.0.1", 0)
        self.app = build_app(self.engine, self.args)
        self.server = make_server(
            self.app, on_ready=ready.set, drain_timeout_s=self.drain_timeout_s, log_level="warning"
        )
        self.client = httpx.Client(base_url=base_url(self.sock), timeout=60)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def _run(self) -> None:
        self.status = asyncio.run(serve_http(self.server, self.sock, self.engine))

    def signal(self) -> None:
        """What SIGTERM does in a server that has the main thread."""
        self.server.handle_exit(signal.SIGTERM, None)

    def join(self) -> int | None:
        """Waits for the end; the exit status."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.status

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = self.server.force_exit = True
        self.join()
        self.sock.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Starts a server over a fake engine that runs a script; it ends with the test."""
    with ExitStack() as stack:

        def start(script: Script = hello, policy: str = "fcfs", **options: object) -> FakeServer:
            return stack.enter_context(FakeServer(FakeEngine(script, policy), **options))

        yield start


@pytest.fixture(scope="module")
def hello_server() -> Iterator[FakeServer]:
    """A server that says "hello" to everything, shared by tests that leave no trace in it."""
    with FakeServer(FakeEngine(hello)) as fake:
        yield fake


def events(text: str) -> list[str]:
    """The data of server-sent events."""
    parts = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts), text
    return [part.removeprefix("data: ") for part in parts]

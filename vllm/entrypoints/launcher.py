# SPDX-License-Identifier: Apache-2.0
"""Runs an app under uvicorn: readiness, draining, signals, and the death of the engine."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_HEADER_BYTES = 64 << 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After the engine's death: how long /health still says so, and how long answers may take to leave.
_REPORT_DEATH_S = 1.0
_DRAIN_AFTER_DEATH_S = 5


class BoundedHttpToolsProtocol(HttpToolsProtocol):
    """Refuses requests whose line and headers are longer than `MAX_HEADER_BYTES`; the parser would
    keep any amount."""

    _in_head = True
    _received_bytes = 0  # of a head that is not complete
    _parsed_bytes = 0  # of its parts that are

    def data_received(self, data: bytes) -> None:
        # The parser keeps a part of a head until it has all of it, and tells nobody.
        if self._in_head and self._received_bytes > MAX_HEADER_BYTES:
            self.send_400_response("Request line and headers are too long.")
            return
        self._received_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head, self._parsed_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > MAX_HEADER_BYTES:
            # uvicorn answers a parser's error with 400 and closes the connection.
            raise ValueError("request line and headers are too long")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._received_bytes = True, 0
        super().on_message_complete()


class Server(uvicorn.Server):
    """Drains on the first SIGINT or SIGTERM, stops at once on the second, and leaves the exit
    status to the caller (uvicorn would raise the signal again)."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.status = 0
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves it out here, and its cancelled task would print a traceback.
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone.
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self.status = 128 + sig
            return
        self.should_exit = True
        running = len(self.server_state.tasks)
        if running:
            logger.info(
                "shutting down: %d running requests get up to %s s; the signal again stops at once",
                running,
                self.config.timeout_graceful_shutdown,
            )


def make_server(
    app: FastAPI,
    *,
    on_ready: Callable[[], None],
    drain_timeout_s: int,
    log_level: str = "info",
    access_log: bool = True,
    tls: Mapping[str, Any] | None = None,
) -> Server:
    """A server of `app`, not yet running.

    Args:
        on_ready: called when requests are answered.
        drain_timeout_s: how long running requests get when the server is told to stop.
        tls: uvicorn's options for HTTPS.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHttpToolsProtocol,
        log_level=log_level,
        access_log=access_log,
        timeout_graceful_shutdown=drain_timeout_s,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=int(envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE),
        **(tls or {}),
    )
    return Server(config, on_ready)


async def serve_http(server: Server, sock: socket.socket, engine_client: EngineClient) -> int:
    """Serves on `sock`, which listens, until told to stop or until the engine dies.

    Returns:
        The exit status: 0 after a drain, 128 + the signal's number after a second signal, 1 when
        the engine died.
    """
    loop, died = asyncio.get_running_loop(), asyncio.Event()
    engine_client.add_death_callback(lambda: _set_from_any_thread(loop, died))
    watch = asyncio.create_task(_stop_when_engine_dies(server, engine_client, died))
    try:
        await server.serve(sockets=[sock])
    finally:
        watch.cancel()
    return server.status


def _set_from_any_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


async def _stop_when_engine_dies(
    server: Server, engine_client: EngineClient, died: asyncio.Event
) -> None:
    await died.wait()
    if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
        logger.error("the engine is dead; VLLM_KEEP_ALIVE_ON_ENGINE_DEATH keeps the server up")
        return
    logger.error("the engine is dead; the server stops: %s", engine_client.dead_error)
    server.status = 1
    server.config.timeout_graceful_shutdown = _DRAIN_AFTER_DEATH_S
    await asyncio.sleep(_REPORT_DEATH_S)
    server.should_exit = True

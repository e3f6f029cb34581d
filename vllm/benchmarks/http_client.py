# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 client that costs little: it shares its cores with the server that it measures. The
protocol is httptools' (the parser of uvicorn), connections are kept."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_READ_BYTES = 1 << 16


class HTTPClientError(Exception):
    """The server cannot be reached, or its answer is none."""


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    has_been_used: bool = False


@dataclass
class _Answer:
    """What httptools' parser tells of a response. The status and whether the connection can be kept
    must be asked of it when the head is complete."""

    status: int = 0
    is_complete: bool = False
    keeps_alive: bool = False
    has_head: bool = False
    body: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.has_head = True
        self.status = self.parser.get_status_code()
        self.keeps_alive = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take_body(self) -> bytes:
        """What came since this was last called."""
        data = b"".join(self.body)
        self.body.clear()
        return data


def _header_lines(headers: Mapping[str, str]) -> str:
    if any(mark in f"{k}{v}" for k, v in headers.items() for mark in "\r\n"):
        raise HTTPClientError("a header holds a line break")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


class HTTPClient:
    """Requests to the server of `base_url`, any number of them at once.

    Raises (every method):
        HTTPClientError: see there.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HTTPClientError(f"{base_url!r} is no URL such as http://localhost:8000")
        is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if is_tls else 80)
        self._ssl = ssl.create_default_context() if is_tls else None
        self._prefix = parts.path.rstrip("/")
        given = {"Host": parts.netloc, "Accept": "*/*", **(headers or {})}
        self._head = _header_lines(given)
        self._idle: list[_Connection] = []

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body."""
        head = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}{_header_lines(headers or {})}"
        stream = self._request(f"{head}\r\n".encode())
        status = await anext(stream)
        return status, b"".join([part async for part in stream])  # type: ignore[misc]

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[int | bytes, None]:
        """The status, then the body as it comes. Closing the generator closes the connection, so
        that the server learns that nobody waits for the rest."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{_header_lines(headers or {})}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with aclosing(self._request(head.encode() + body)) as parts:
            async for part in parts:
                yield part

    async def _request(self, message: bytes) -> AsyncGenerator[int | bytes, None]:
        connection = None
        try:
            while True:
                connection = self._idle.pop() if self._idle else await self._connect()
                answer = _Answer()
                connection.writer.write(message)
                data = await self._first_bytes(connection)
                if data or not connection.has_been_used:
                    break
                connection.writer.close()  # The server has closed it meanwhile.
            told_status = False
            while True:
                if not data:
                    raise HTTPClientError("the server closed the connection within its answer")
                answer.parser.feed_data(data)
                if answer.has_head and not told_status:
                    told_status = True
                    yield answer.status
                if answer.body:
                    yield answer.take_body()
                if answer.is_complete:
                    break
                data = await connection.reader.read(_READ_BYTES)
            if answer.keeps_alive:
                connection.has_been_used = True
                self._idle.append(connection)
                connection = None
        except OSError as error:
            raise HTTPClientError(f"{self._host}:{self._port}: {error}") from error
        except httptools.HttpParserError as error:
            raise HTTPClientError(f"the answer is no HTTP: {error}") from error
        finally:
            if connection is not None:
                connection.writer.close()

    async def _connect(self) -> _Connection:
        return _Connection(
            *await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=1 << 20)
        )

    @staticmethod
    async def _first_bytes(connection: _Connection) -> bytes:
        try:
            return await connection.reader.read(_READ_BYTES)
        except ConnectionError:
            if connection.has_been_used:
                return b""
            raise

    def close(self) -> None:
        """Closes what is idle."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

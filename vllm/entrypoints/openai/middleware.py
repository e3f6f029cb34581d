# SPDX-License-Identifier: Apache-2.0
"""What stands before every route: the key, a bound on bodies, ids, counts, an answer when the server
stops."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import json_error, make_error
from vllm.utils import random_uuid

# Answered without a key: probes have none.
LIVENESS_PATHS = frozenset({"/health", "/ping"})
# What /load counts.
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
MAX_REQUEST_ID_CHARS = 128
# Far more than any context holds; parsing keeps other requests waiting.
MAX_BODY_BYTES = 16 << 20


class AuthenticationMiddleware:
    """Lets a request pass if it has one of the keys as `Authorization: Bearer KEY`, or asks only
    whether the server is alive."""

    def __init__(self, app: ASGIApp, tokens: Iterable[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        guarded = scope["type"] in ("http", "websocket") and path not in LIVENESS_PATHS
        if guarded and not self._is_known(scope):
            error = make_error("missing or wrong API key: send `Authorization: Bearer KEY`", 401)
            response = json_error(error, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        header = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Digests, all of them: neither a key's length nor which one matched shows in the time.
        digest = hashlib.sha256(token.strip()).digest()
        return any([secrets.compare_digest(digest, known) for known in self._digests])


class RequestIdMiddleware:
    """Answers bear the header X-Request-Id: the request's own, or one that is made up here."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.get("x-request-id", "")
        # A bad one is refused by the route, and not sent back.
        if not request_id or len(request_id) > MAX_REQUEST_ID_CHARS:
            request_id = random_uuid()
            headers.setdefault("x-request-id", request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class ServerLoad:
    """Requests that the engine works for, from their arrival to the end of their answers."""

    def __init__(self) -> None:
        self.value = 0


class LoadMiddleware:
    """Counts them in `load`."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self.app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in GENERATING_PATHS:
            await self.app(scope, receive, send)
            return
        self._load.value += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._load.value -= 1


class BodyLimitMiddleware:
    """Refuses bodies of more than `max_bytes` with 413, before they are all in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if int(declared) > self.max_bytes:
            if not any(name == b"expect" for name, _ in scope["headers"]):
                await self._discard(receive)
            response = json_error(make_error(self._message, 413), {"Connection": "close"})
            await response(scope, receive, send)
            return
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                if message.get("more_body", False):
                    await self._discard(receive)
                raise HTTPException(413, self._message, {"Connection": "close"})
            return message

        await self.app(scope, bounded_receive, send)

    async def _discard(self, receive: Receive) -> None:
        """Takes the rest of the body, within reason: closing a connection on which data is still
        coming would take the answer from the client, which reads only when it has sent all."""
        left = 4 * self.max_bytes
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    @property
    def _message(self) -> str:
        return f"the request's body is larger than {self.max_bytes >> 20} MiB"


class ShutdownMiddleware:
    """Answers requests that are cancelled because the server stops, where no answer has begun; a
    stream just ends, without `[DONE]`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except asyncio.CancelledError:
            if not has_begun:
                error = make_error("the server is shutting down", 503)
                await json_error(error, {"Connection": "close"})(scope, receive, send)

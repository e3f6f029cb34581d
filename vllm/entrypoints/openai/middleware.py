# SPDX-License-Identifier: Apache-2.0
"""What stands before every route: the key, and a bound on bodies."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import json_error, make_error

# Answered without a key: probes have none.
LIVENESS_PATHS = frozenset({"/health", "/ping"})
# Far more than any context holds; parsing keeps other requests waiting.
MAX_BODY_BYTES = 16 << 20


class AuthenticationMiddleware:
    """Lets a request pass if it has one of the keys as `Authorization: Bearer KEY`, or asks only
    whether the server is alive."""

    def __init__(self, app: ASGIApp, tokens: Iterable[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in LIVENESS_PATHS
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
            # The rest of the body is not read: the connection cannot be used again.
            response = json_error(make_error(self._message, 413), {"Connection": "close"})
            await response(scope, receive, send)
            return
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, self._message, {"Connection": "close"})
            return message

        await self.app(scope, bounded_receive, send)

    @property
    def _message(self) -> str:
        return f"the request's body is larger than {self.max_bytes >> 20} MiB"

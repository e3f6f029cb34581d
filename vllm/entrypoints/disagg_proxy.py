# SPDX-License-Identifier: Apache-2.0
"""A proxy before prefill and decode servers, for local use and tests.

A request goes to a prefill server, which computes its prompt and draws one token; what that answers
in `kv_transfer_params` goes with the request to a decode server, which loads the prompt's keys and
values and answers. Several servers of a kind take turns.

A decode server can compute a prompt itself. So it gets requests alone that have no one prompt and
one choice, and those whose prefill server cannot be reached.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm.benchmarks.http_client import HTTPClient, HTTPClientError
from vllm.entrypoints.openai.errors import (
    add_error_handlers,
    error_of,
    json_error,
    make_error,
)
from vllm.entrypoints.openai.protocol.common import RequestError
from vllm.entrypoints.openai.streaming import DONE, ClientGone, until_disconnect
from vllm.logger import init_logger
from vllm.utils import random_uuid

logger = init_logger(__name__)

HEALTH_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 64 << 20
_PASSED_HEADERS = ("authorization", "x-request-id")
# What the prefill server is not asked for: it gives one token, which nobody sees.
_DECODE_ONLY = (
    "stream", "stream_options", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids",
    "echo", "return_token_ids",
)  # fmt: skip
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Servers:
    """Servers of one kind, which take turns."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.clients = {url: HTTPClient(url) for url in urls}
        self._turns = itertools.cycle(self.clients)

    def in_turn(self) -> list[tuple[str, HTTPClient]]:
        """All of them, the one whose turn it is first."""
        first = next(self._turns)
        urls = list(self.clients)
        start = urls.index(first)
        return [(url, self.clients[url]) for url in urls[start:] + urls[:start]]

    async def first_answer(
        self, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, AsyncGenerator[int | bytes, None]]:
        """The status and the rest of the answer of the first that can be reached. The caller closes
        the generator.

        Raises:
            HTTPClientError: none can be reached.
        """
        failures = []
        for url, client in self.in_turn():
            answer = client.post(path, body, headers)
            try:
                return await anext(answer), answer  # type: ignore[return-value]
            except HTTPClientError as error:
                failures.append(str(error))
                logger.warning("%s cannot be reached: %s", url, error)
            except BaseException:
                await answer.aclose()
                raise
        raise HTTPClientError("; ".join(failures))

    async def health(self) -> dict[str, bool]:
        """Whether each says that it is healthy."""
        found = await asyncio.gather(*map(_is_healthy, self.clients.values()))
        return dict(zip(self.clients, found))

    def close(self) -> None:
        """Closes connections on which nothing happens."""
        for client in self.clients.values():
            client.close()


async def _is_healthy(client: HTTPClient) -> bool:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            status, _ = await client.get("/health")
    except (HTTPClientError, TimeoutError):
        return False
    return status == 200


class DisaggProxy:
    """Handles the routes."""

    def __init__(self, prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> None:
        self.prefill = Servers(prefill_urls)
        self.decode = Servers(decode_urls)

    async def generate(self, request: Request, path: str) -> Response:
        """`/v1/completions` and `/v1/chat/completions`.

        Raises:
            RequestError: the body is no JSON object, or says what only the proxy may say.
            HTTPClientError: no decode server can be reached.
            ClientGone: nobody waits for the answer any more; the servers were told.
        """
        body = await _read_body(request)
        headers = {n: v for n in _PASSED_HEADERS if (v := request.headers.get(n)) is not None}
        headers.setdefault("x-request-id", random_uuid())
        return await until_disconnect(request, self._generate(path, body, headers))

    async def _generate(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        if _goes_through_prefill(body):
            status, answer = await self._prefill(path, body, headers)
            if 400 <= status < 500:
                return Response(answer, status, media_type="application/json")
            params = _transfer_params(answer) if status == 200 else None
            if params is not None:
                body = {**body, "kv_transfer_params": params}
        status, parts = await self.decode.first_answer(path, _encode(body), headers)
        if body.get("stream") is True and status == 200:
            return StreamingResponse(_events(parts), media_type="text/event-stream")
        async with aclosing(parts):
            content = b"".join([part async for part in parts])  # type: ignore[misc]
        return Response(content, status, media_type="application/json")

    async def _prefill(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Status and body of the prefill server's answer; 502 if there is none."""
        wanted = {name: value for name, value in body.items() if name not in _DECODE_ONLY}
        wanted |= {"max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
        if "max_completion_tokens" in wanted:
            wanted["max_completion_tokens"] = 1
        try:
            status, parts = await self.prefill.first_answer(path, _encode(wanted), headers)
            async with aclosing(parts):
                answer = b"".join([part async for part in parts])  # type: ignore[misc]
        except HTTPClientError as error:
            logger.warning("the decode server computes a prompt itself: %s", error)
            return 502, b""
        if status >= 500:
            logger.warning("prefill failed with status %d; the decode server takes over", status)
        return status, answer

    async def models(self, request: Request) -> Response:
        """`/v1/models`, of a decode server."""
        headers = {n: v for n in _PASSED_HEADERS if (v := request.headers.get(n)) is not None}
        for _, client in self.decode.in_turn():
            try:
                status, body = await client.get("/v1/models", headers)
            except HTTPClientError:
                continue
            return Response(body, status, media_type="application/json")
        raise HTTPClientError("no decode server can be reached")

    async def health(self) -> JSONResponse:
        """200 if a decode server and a prefill server are healthy; says which are."""
        prefill, decode = await asyncio.gather(self.prefill.health(), self.decode.health())
        status = 200 if any(prefill.values()) and any(decode.values()) else 503
        return JSONResponse({"prefill": prefill, "decode": decode}, status)


async def _read_body(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if body.get("kv_transfer_params"):
        raise RequestError(
            "kv_transfer_params are set by this proxy: leave them out", param="kv_transfer_params"
        )
    return body


def _goes_through_prefill(body: dict[str, Any]) -> bool:
    """Whether the prompt can come from elsewhere: it is one, with one choice, and nothing is asked
    about its tokens."""
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    if is_list and len(prompt) > 1:
        return False
    if body.get("n") not in (None, 1) or body.get("use_beam_search"):
        return False
    asks_about_prompt = body.get("prompt_logprobs") is not None or (
        body.get("echo") and body.get("logprobs") is not None
    )
    return not asks_about_prompt and body.get("max_tokens") != 0


def _transfer_params(answer: bytes) -> dict[str, Any] | None:
    """What the prefill server says of the pages; None if it keeps none."""
    try:
        params = json.loads(answer).get("kv_transfer_params")
    except (ValueError, AttributeError):
        logger.warning("the prefill server's answer is no JSON object")
        return None
    return params if isinstance(params, dict) else None


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def _events(parts: AsyncGenerator[int | bytes, None]) -> AsyncIterator[bytes]:
    """The stream as it comes. One that breaks off ends with an error, as the client would otherwise
    take it for complete."""
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part  # type: ignore[misc]
        except HTTPClientError as error:
            logger.warning("a decode server's stream broke off: %s", error)
            text = make_error(f"the decode server's stream broke off: {error}", 502)
            yield f"\n\ndata: {text.model_dump_json()}\n\n{DONE}".encode()


def build_proxy(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> FastAPI:
    """The app.

    Raises:
        HTTPClientError: something is no URL.
    """
    proxy = DisaggProxy(prefill_urls, decode_urls)
    app = FastAPI(title="vLLM disaggregation proxy", openapi_url=None)
    add_error_handlers(app)

    async def on_unreachable(_: Request, error: Exception) -> JSONResponse:
        return json_error(make_error(f"no server can be reached: {error}", 502))

    async def on_client_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return json_error(error_of(error))

    app.exception_handler(HTTPClientError)(on_unreachable)
    app.exception_handler(ClientGone)(on_client_gone)
    app.exception_handler(Exception)(on_error)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.post(path)(_handler(proxy, path))
    app.get("/v1/models")(proxy.models)
    app.get("/health")(proxy.health)
    app.router.on_shutdown += [proxy.prefill.close, proxy.decode.close]
    return app


def _handler(proxy: DisaggProxy, path: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await proxy.generate(request, path)

    return handle

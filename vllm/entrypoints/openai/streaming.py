# SPDX-License-Identifier: Apache-2.0
"""Outputs of several engine requests as one stream, and streams as server-sent events.

A request must end in the engine when its client has gone, at whatever point that is: `OutputStream`
owns the engine's generators, and closing it, which every path here does, aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import error_of
from vllm.outputs import RequestOutput

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """The client hung up before it had its answer."""


class OutputStream:
    """The outputs of one or several engine requests as (index of the request, output).

    `start` waits for the first one, so that an error which shows before any output was made can
    still be an HTTP status.
    """

    def __init__(self, generators: Sequence[AsyncGenerator[RequestOutput, None]]) -> None:
        self._merged = _merge(generators) if len(generators) > 1 else _numbered(generators[0])
        self._first: tuple[int, RequestOutput] | None = None

    async def start(self) -> None:
        """Waits for the first output.

        Raises:
            Exception: what the engine raised.
        """
        try:
            self._first = await anext(self._merged, None)
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        if self._first is not None:
            yield self._first
        async for item in self._merged:
            yield item

    async def aclose(self) -> None:
        """Aborts what has not ended."""
        await self._merged.aclose()


async def _numbered(
    generator: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(generator):
        async for output in generator:
            yield 0, output


async def _merge(
    generators: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs as they come. The first error ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(generator):
                async for output in generator:
                    queue.put_nowait((index, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(generators)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up.

    Raises:
        ClientGone: it hung up.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Server-sent events, a chunk an event, from `chunks`; `outputs` is closed at the end, however
    it comes. An error becomes an event; `[DONE]` is the last one."""

    def __init__(self, chunks: AsyncIterator[BaseModel], outputs: OutputStream) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(chunks), media_type="text/event-stream", headers=headers)
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


async def _events(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    except Exception as error:
        yield f"data: {error_of(error).model_dump_json()}\n\n"
    yield DONE

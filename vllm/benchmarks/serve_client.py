# SPDX-License-Identifier: Apache-2.0
"""One request to an OpenAI-compatible server, streamed and timed piece by piece."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm.benchmarks.http_client import HTTPClient, HTTPClientError

@dataclass(frozen=True)
class ServeRequest:
    """A prompt of `prompt_len` tokens, to be continued by `output_len`."""

    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Target:
    """Where requests go, and what all of them say."""

    endpoint: str
    is_chat: bool
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: ServeRequest) -> dict[str, Any]:
        """The request as JSON."""
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        if self.is_chat:
            asked: dict[str, Any] = {
                "messages": [{"role": "user", "content": prompt}],
                "max_completion_tokens": request.output_len,
            }
        else:
            asked = {"prompt": prompt, "max_tokens": request.output_len}
        return {
            "model": self.model,
            **asked,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }


@dataclass
class Timing:
    """What came of a request. Times in seconds; `start` on the clock of `time.perf_counter`, `itl`
    between the pieces, `ttft` from the start to the first of them."""

    start: float
    prompt_len: int
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether it ended as it should."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Mean time of a token after the first; 0 where there is none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


async def run_request(client: HTTPClient, target: Target, request: ServeRequest) -> Timing:
    """Sends a request and times its answer. What goes wrong is told in `error`."""
    body = json.dumps(target.body(request)).encode()
    timing = Timing(time.perf_counter(), request.prompt_len)
    try:
        async with aclosing(client.post(target.endpoint, body)) as answer:
            status = await anext(answer)
            if status != 200:
                timing.error = _error_of(status, b"".join([part async for part in answer]))
            else:
                await _time_stream(answer, timing)
    except (HTTPClientError, ValueError, KeyError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


async def _time_stream(chunks: AsyncIterator[bytes], timing: Timing) -> None:
    rest, is_complete, latest = b"", False, timing.start
    num_pieces = 0
    async for chunk in chunks:
        now = time.perf_counter()
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                is_complete = True
                continue
            message = json.loads(data)
            if "error" in message:
                timing.error = str(message["error"].get("message", message["error"]))
                return
            usage = message.get("usage")
            if usage:
                timing.prompt_len = usage["prompt_tokens"]
                timing.output_len = usage["completion_tokens"]
            if not any(_says(choice, num_pieces) for choice in message.get("choices") or ()):
                continue
            num_pieces += 1
            if num_pieces == 1:
                timing.ttft = now - timing.start
            else:
                timing.itl.append(now - latest)
            latest = now
    timing.latency = latest - timing.start
    timing.output_len = timing.output_len or num_pieces
    if not is_complete or not num_pieces:
        timing.error = "the stream ended before its end" if num_pieces else "no output"


def _says(choice: dict[str, Any], num_pieces: int) -> bool:
    """Whether it brings text. An answer without any has its end for a piece."""
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    return bool(text) or (choice.get("finish_reason") is not None and num_pieces == 0)


def _error_of(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace")
    return f"{status}: {message}"

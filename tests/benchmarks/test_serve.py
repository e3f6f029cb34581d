# SPDX-License-Identifier: Apache-2.0
"""Figures of `vllm bench serve`, and its HTTP client, without a server of ours."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from vllm.benchmarks.http_client import HTTPClient, HTTPClientError
from vllm.benchmarks.serve_client import ServeRequest, Target, Timing, run_request
from vllm.benchmarks.serve_metrics import ServeResult, result_json, result_text


def timing(start, ttft, gaps, error=""):
    return Timing(start, 10, len(gaps) + 1, ttft, gaps, ttft + sum(gaps), error)


RESULT = ServeResult(
    (
        timing(0.0, 0.1, [0.1, 0.2]),
        timing(0.05, 0.3, [0.3]),
        timing(2.0, 0.2, []),
        timing(2.0, 0.0, [], "refused"),
    ),
    duration_s=4.0,
    percentiles=(50.0, 99.0),
    limits=(("ttft", 250.0), ("tpot", 160.0)),
)


def test_figures():
    """By hand. Failed requests count in nothing; a request of one token has no time per token."""
    figures = result_json(RESULT, detailed=True)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert figures["output_throughput"] == 1.5 and figures["total_token_throughput"] == 9.0
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["median_tpot_ms"] == pytest.approx(np.median([150.0, 300.0]))
    assert figures["mean_itl_ms"] == pytest.approx(200.0)
    assert figures["p99_e2el_ms"] == pytest.approx(np.percentile([400.0, 600.0, 200.0], 99))
    # The second is too slow in both; the third has no TPOT.
    assert figures["request_goodput"] == pytest.approx(2 / 4)
    assert figures["max_concurrent_requests"] == 2 and figures["max_output_tokens_per_s"] == 5
    assert figures["errors"] == ["", "", "", "refused"]


def test_text_has_a_line_for_each():
    text = result_text(RESULT, ["ttft", "itl"], 7, 2.5)
    assert "Request rate configured (RPS):           2.50" in text and "P50 ITL (ms):" in text
    assert "TPOT" not in text and all(len(line) <= 52 for line in text.splitlines())


def test_nothing_succeeded():
    empty = ServeResult((timing(0.0, 0.0, [], "no"),), 1.0)
    assert result_json(empty, False)["mean_ttft_ms"] == 0.0 and result_text(empty, ["tpot"])


def chunk(text, **more):
    choice = {"index": 0, "text": text, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def http(body, status="200 OK", chunked=False, close=False):
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\n".encode()
    if close:
        head += b"Connection: close\r\n"
    if not chunked:
        return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    coded = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts) + b"0\r\n\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + coded


def ask(answers: list[bytes], requests: int = 1, piece: int = 11) -> tuple[list[Timing], int]:
    """Timings from a server that gives these answers in turn, in small pieces; how many connections
    it saw. An answer of b"" is a closed connection."""
    left, connections = list(answers), 0

    async def serve(reader, writer):
        nonlocal connections
        connections += 1
        while left:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return  # the client has closed it
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["stream"] is True
            answer = left.pop(0)
            for begin in range(0, len(answer), piece):
                writer.write(answer[begin : begin + piece])
                await writer.drain()
            if not answer or b"Connection: close" in answer:
                break
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HTTPClient(f"http://127.0.0.1:{port}/api", {"X-A": "b"})
        target = Target("/v1/completions", False, "m")
        timings = []
        for _ in range(requests):
            timings.append(await run_request(client, target, ServeRequest((1, 2), 2, 2)))
        client.close()
        server.close()
        return timings

    return asyncio.run(asyncio.wait_for(run(), 60)), connections


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [1, 11, 10_000])
def test_streams_in_any_pieces(chunked, piece):
    body = chunk("a") + chunk("b\u00e9") + chunk("") + USAGE + DONE
    (got,), _ = ask([http(body, chunked=chunked)], piece=piece)
    assert got.success, got.error
    assert (got.prompt_len, got.output_len, len(got.itl)) == (9, 2, 1)
    assert 0 < got.ttft <= got.latency


def test_connections_are_kept():
    body = chunk("a") + USAGE + DONE
    timings, connections = ask([http(body), http(body, chunked=True), http(body)], 3)
    assert all(t.success for t in timings) and connections == 1
    timings, connections = ask([http(body, close=True), http(body)], 2)
    assert all(t.success for t in timings) and connections == 2


def test_a_kept_connection_that_was_closed_is_no_error():
    """Servers close idle connections whenever they like."""
    body = chunk("a") + USAGE + DONE
    timings, connections = ask([http(body), b"", http(body)], 2)
    assert all(t.success for t in timings), timings
    assert connections == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b'{"error": {"message": "too long"}}', "400 Bad Request"), "400: too long"),
        (http(b"oops", "502 Bad Gateway"), "502: oops"),
        (http(chunk("a") + b'data: {"error": {"message": "died"}}\n\n' + DONE), "died"),
        (http(chunk("a")), "before its end"),
        (http(DONE), "no output"),
        (http(b"data: {nonsense\n\n"), "JSONDecodeError"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
        (b"", "closed the connection"),
    ],
)
def test_what_goes_wrong_is_told(answer, words):
    (got,), _ = ask([answer])
    assert not got.success and words in got.error


def test_bad_urls():
    for url in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(HTTPClientError):
            HTTPClient(url)
    with pytest.raises(HTTPClientError):
        HTTPClient("http://x", {"A": "b\r\nC: d"})

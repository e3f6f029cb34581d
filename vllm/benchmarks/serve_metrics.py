# SPDX-License-Identifier: Apache-2.0
"""Figures of a serving benchmark, in upstream's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.benchmarks.serve_client import Timing

# Metric -> its heading and its name in the lines below.
METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_WIDTH = 50


@dataclass(frozen=True)
class Spread:
    """Mean, median, standard deviation and percentiles of some times, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Iterable[float]) -> Spread:
        """All zero where there is nothing to measure."""
        ms = np.asarray(seconds or [0.0]) * 1000
        return cls(
            mean=float(ms.mean()),
            median=float(np.median(ms)),
            std=float(ms.std()),
            percentiles=tuple((p, float(np.percentile(ms, p))) for p in percentiles),
        )


@dataclass(frozen=True)
class ServeResult:
    """A run of `duration_s` seconds. `limits` are upper bounds in milliseconds that a request must
    keep to be good; none: goodput is not asked for."""

    timings: tuple[Timing, ...]
    duration_s: float
    percentiles: tuple[float, ...] = (99.0,)
    limits: tuple[tuple[str, float], ...] = ()

    @property
    def successful(self) -> list[Timing]:
        """Requests that ended as they should."""
        return [timing for timing in self.timings if timing.success]

    @property
    def num_input_tokens(self) -> int:
        return sum(timing.prompt_len for timing in self.successful)

    @property
    def num_output_tokens(self) -> int:
        return sum(timing.output_len for timing in self.successful)

    def values(self, metric: str) -> list[float]:
        """A metric in seconds, of each request; of `itl` all there are."""
        if metric == "itl":
            return [gap for timing in self.successful for gap in timing.itl]
        return [_value(timing, metric) for timing in self.successful]

    def spread(self, metric: str) -> Spread:
        """A metric over all requests; TPOT only of those with a second token."""
        values = self.values(metric)
        if metric == "tpot":
            values = [value for value in values if value > 0]
        return Spread.of(values, self.percentiles)

    @property
    def num_good(self) -> int:
        """Requests that keep every limit."""
        return sum(
            all(_value(timing, metric) * 1000 <= limit for metric, limit in self.limits)
            for timing in self.successful
        )

    @property
    def peak_concurrency(self) -> int:
        """Most requests under way at once."""
        edges = [(t.start, 1) for t in self.successful]
        edges += [(t.start + t.latency, -1) for t in self.successful]
        level = peak = 0
        for _, change in sorted(edges):
            level += change
            peak = max(peak, level)
        return peak

    @property
    def peak_output_per_second(self) -> float:
        """Pieces that came in the best second; a piece is a token, or a few."""
        times: list[float] = []
        for timing in self.successful:
            first = timing.start + timing.ttft
            times += [first, *(first + np.cumsum(timing.itl)).tolist()]
        if not times:
            return 0.0
        seconds = np.floor(np.asarray(times) - min(times)).astype(int)
        return float(np.bincount(seconds).max())


def _value(timing: Timing, metric: str) -> float:
    return timing.latency if metric == "e2el" else getattr(timing, metric)


def result_text(
    result: ServeResult,
    shown: Sequence[str],
    max_concurrency: int | None = None,
    request_rate: float = float("inf"),
) -> str:
    """The figures for people; `shown` are the metrics to spell out."""
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=_WIDTH, c="=")]
    lines += [_line(name, value) for name, value in _head(result, max_concurrency, request_rate)]
    for metric in shown:
        heading, name = METRICS[metric]
        spread = result.spread(metric)
        lines.append("{s:{c}^{n}}".format(s=heading, n=_WIDTH, c="-"))
        lines.append(_line(f"Mean {name} (ms):", spread.mean))
        lines.append(_line(f"Median {name} (ms):", spread.median))
        lines += [_line(f"P{p:g} {name} (ms):", value) for p, value in spread.percentiles]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _head(
    result: ServeResult, max_concurrency: int | None, request_rate: float
) -> list[tuple[str, float]]:
    duration, done = result.duration_s, len(result.successful)
    rows: list[tuple[str, float]] = [
        ("Successful requests:", done),
        ("Failed requests:", len(result.timings) - done),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS):", request_rate))
    rows += [
        ("Benchmark duration (s):", duration),
        ("Total input tokens:", result.num_input_tokens),
        ("Total generated tokens:", result.num_output_tokens),
        ("Request throughput (req/s):", done / duration),
    ]
    if result.limits:
        rows.append(("Request goodput (req/s):", result.num_good / duration))
    total = result.num_input_tokens + result.num_output_tokens
    rows += [
        ("Output token throughput (tok/s):", result.num_output_tokens / duration),
        ("Peak output token throughput (tok/s):", result.peak_output_per_second),
        ("Peak concurrent requests:", float(result.peak_concurrency)),
        ("Total token throughput (tok/s):", total / duration),
    ]
    return rows


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def result_json(result: ServeResult, detailed: bool) -> dict[str, Any]:
    """The figures for programs, under upstream's keys; with `detailed` those of each request."""
    duration, done = result.duration_s, len(result.successful)
    total = result.num_input_tokens + result.num_output_tokens
    values: dict[str, Any] = {
        "duration": duration,
        "completed": done,
        "failed": len(result.timings) - done,
        "total_input_tokens": result.num_input_tokens,
        "total_output_tokens": result.num_output_tokens,
        "request_throughput": done / duration,
        "request_goodput": result.num_good / duration if result.limits else None,
        "output_throughput": result.num_output_tokens / duration,
        "total_token_throughput": total / duration,
        "max_output_tokens_per_s": result.peak_output_per_second,
        "max_concurrent_requests": result.peak_concurrency,
    }
    for metric in METRICS:
        spread = result.spread(metric)
        values |= {
            f"mean_{metric}_ms": spread.mean,
            f"median_{metric}_ms": spread.median,
            f"std_{metric}_ms": spread.std,
            **{f"p{p:g}_{metric}_ms": value for p, value in spread.percentiles},
        }
    if detailed:
        values |= {
            "input_lens": [timing.prompt_len for timing in result.timings],
            "output_lens": [timing.output_len for timing in result.timings],
            "ttfts": [timing.ttft for timing in result.timings],
            "itls": [timing.itl for timing in result.timings],
            "errors": [timing.error for timing in result.timings],
        }
    return values

# SPDX-License-Identifier: Apache-2.0
"""Figures as text for people and as JSON for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.benchmarks.compare import Comparison, Measurement
from vllm.benchmarks.workload import Workload


def workload_line(workload: Workload) -> str:
    """`8 requests, 32 tokens in, 128 out each`; a range where prompts differ in length."""
    lengths = sorted({len(prompt) for prompt in workload.prompts})
    in_tokens = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    requests = "1 request" if workload.num_prompts == 1 else f"{workload.num_prompts} requests"
    return f"{requests}, {in_tokens} tokens in, {workload.output_len} out each"


def comparison_text(comparison: Comparison) -> str:
    """The figures of both engines and their ratio, a few lines."""
    workload, ratios = comparison.workload, comparison.round_ratios
    return "\n".join(
        (
            f"{workload_line(workload)}; greedy; median of {len(ratios)} rounds, in turn",
            _measurement_line(comparison.ours, workload),
            _measurement_line(comparison.peer, workload),
            f"  ratio: {comparison.ratio:.2f} x {comparison.peer.info.name} "
            f"({min(ratios):.2f} to {max(ratios):.2f} round by round); same first token in "
            f"{comparison.same_first_tokens} of {workload.num_prompts}",
        )
    )


def _measurement_line(measurement: Measurement, workload: Workload) -> str:
    info, seconds = measurement.info, measurement.seconds
    settings = f" ({info.settings})" if info.settings else ""
    rate = workload.num_output_tokens / measurement.median_seconds
    return (
        f"  {info.name + ' ' + info.version:<24} {measurement.median_seconds:8.3f} s  "
        f"{rate:8.1f} output tokens/s  [{min(seconds):.3f} to {max(seconds):.3f} s]  "
        f"{info.dtype}, {info.num_threads} threads{settings}"
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The same, every time included."""
    workload = comparison.workload
    return {
        **workload_json(workload),
        "engines": [
            {
                **asdict(measurement.info),
                "seconds": list(measurement.seconds),
                "median_seconds": measurement.median_seconds,
                "output_tokens_per_second": workload.num_output_tokens / measurement.median_seconds,
            }
            for measurement in (comparison.ours, comparison.peer)
        ],
        "ratio": comparison.ratio,
        "round_ratios": list(comparison.round_ratios),
        "same_first_tokens": comparison.same_first_tokens,
    }


def workload_json(workload: Workload) -> dict[str, Any]:
    return {
        "num_requests": workload.num_prompts,
        "num_input_tokens": workload.num_input_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "output_len": workload.output_len,
    }


def emit(text: str, results: Any, as_json: bool, output_json: str | None) -> None:
    """Prints the text, or with `as_json` the results instead; writes them to `output_json` too."""
    print(json.dumps(results, indent=2) if as_json else text)
    if output_json:
        Path(output_json).write_text(json.dumps(results, indent=2) + "\n")
        print(f"wrote {output_json}", file=sys.stderr)

# SPDX-License-Identifier: Apache-2.0
"""Seconds from the start of a server's process until /health answers: with the compile caches of
the runs before, and with empty ones."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from vllm.benchmarks.measures import MeasurePlan, median_of
from vllm.benchmarks.measures.server import ServerCommand, our_server, running, with_cold_caches
from vllm.benchmarks.peers.model_files import hf_folder
from vllm.benchmarks.peers.upstream import upstream_settings
from vllm.benchmarks.process import plain_environment, reason
from vllm.benchmarks.suite_goals import READY_COLD, READY_WARM
from vllm.benchmarks.suite_results import Measure

_MOST_ROUNDS = 3


def run(plan: MeasurePlan) -> tuple[Measure, ...]:
    """Ours, medians of up to three pairs of starts; upstream's, one pair, since a start of it takes
    a minute or more. One that does not start has no figure, and the note says why."""
    ours = our_server(plan.engine_args)
    pairs = [_cold_and_warm(plan, ours, f"vllm, {which}") for which in plan.rounds(_MOST_ROUNDS)]
    cold, warm = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    theirs, note = (None, None), median_of(len(pairs), "start")
    if plan.upstream_python is not None:
        try:
            # Its model's files are made here, by libraries that may be missing.
            server = _upstream_server(plan, plan.upstream_python)
            theirs = _cold_and_warm(plan, server, "upstream")
            note += ", upstream: one"
        except Exception as error:
            note += f"; upstream failed: {reason(error)}"
    return (
        _measure(READY_WARM, warm, theirs[1], note),
        _measure(READY_COLD, cold, theirs[0], note),
    )


def _measure(name: str, seconds: float, theirs: float | None, note: str) -> Measure:
    if theirs is None:
        return Measure(name, seconds, "s", note=note)
    return Measure(name, seconds, "s", "upstream", theirs, seconds / theirs, note)


def _cold_and_warm(plan: MeasurePlan, server: ServerCommand, name: str) -> tuple[float, float]:
    """Seconds of a start with empty caches, and of the one after it."""
    with tempfile.TemporaryDirectory() as folder:
        server = with_cold_caches(server, Path(folder))
        cold = _start(plan, server, f"{name}, cold")
        return cold, _start(plan, server, f"{name}, warm")


def _start(plan: MeasurePlan, server: ServerCommand, name: str) -> float:
    plan.on_step(f"ready: {name}")
    with running(server, name, plan.timeout_s) as ready:
        return ready.ready_seconds


def _upstream_server(plan: MeasurePlan, python: str) -> ServerCommand:
    args = plan.engine_args
    environment = {**plain_environment(), **upstream_settings()}
    environment.pop("PYTHONPATH", None)  # its vllm, not ours
    # Its `vllm serve` looks for a distribution of that name and does not find that of the CPU's wheel.
    command = (
        os.path.abspath(python), "-m", "vllm.entrypoints.openai.api_server",
        f"--model={hf_folder(args.model, args.dtype)}", f"--dtype={args.dtype}",
        f"--max-model-len={args.max_model_len}",
    )  # fmt: skip
    return ServerCommand(command, environment, cwd="/")

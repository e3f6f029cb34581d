# SPDX-License-Identifier: Apache-2.0
"""What is left of the offline rate through HTTP: 32 streams of `vllm bench serve`, its own process
on the server's cores, in turn with the same prompts given to `LLM`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks import serve
from vllm.benchmarks.compare import checked_run
from vllm.benchmarks.engine import VllmSpec
from vllm.benchmarks.measures import MeasurePlan, median_of
from vllm.benchmarks.measures.server import our_server, running
from vllm.benchmarks.process import EngineFailed, engine_processes, plain_environment
from vllm.benchmarks.suite_goals import HTTP_SHARE
from vllm.benchmarks.suite_results import Measure
from vllm.benchmarks.workload import Workload
from vllm.utils.argparse_utils import FlexibleArgumentParser

STREAMS, INPUT_LEN, OUTPUT_LEN = 32, 144, 128


def run(plan: MeasurePlan) -> tuple[Measure, ...]:
    """The median rate through HTTP, beside the offline one."""
    http, offline = [], []
    # Text is made offline too: the server makes it of every token.
    spec = VllmSpec(plan.engine_args, detokenize=True)
    with engine_processes([spec], timeout_s=plan.timeout_s) as (engine,):
        with running(our_server(plan.engine_args), "vllm serve", plan.timeout_s) as server:
            plan.on_step("http: warm-up")
            checked_run(engine, _workload(plan, plan.seed))
            _bench_serve(plan, server.port, plan.seed)
            for i, which in enumerate(plan.rounds()):
                plan.on_step(f"http: round {which}")
                # A seed for each round: no prompt is found in a cache of the round before.
                workload = _workload(plan, plan.seed + 1 + i)
                seconds = checked_run(engine, workload).seconds
                offline.append(workload.num_output_tokens / seconds)
                http.append(_bench_serve(plan, server.port, plan.seed + 1 + i))
    ratio = statistics.median(h / o for h, o in zip(http, offline, strict=True))
    note = f"{INPUT_LEN} tokens in, {OUTPUT_LEN} out each; {median_of(len(http), 'round')}"
    rate, offline_rate = statistics.median(http), statistics.median(offline)
    return (
        Measure(HTTP_SHARE, rate, "output tokens/s", "offline", offline_rate, ratio, note),
    )


def _flags(seed: int) -> list[str]:
    return [
        f"--num-prompts={STREAMS}", f"--max-concurrency={STREAMS}", f"--input-len={INPUT_LEN}",
        f"--output-len={OUTPUT_LEN}", f"--seed={seed}",
    ]  # fmt: skip


def _workload(plan: MeasurePlan, seed: int) -> Workload:
    """The prompts that `vllm bench serve` makes for this seed."""
    from vllm.tokenizers import get_tokenizer

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    args = plan.engine_args
    tokenizer = get_tokenizer(args.tokenizer or args.model, args.tokenizer_mode)
    requests = serve.random_requests(parser.parse_args(_flags(seed)), tokenizer, as_text=False)
    return Workload(tuple(tuple(request.prompt) for request in requests), OUTPUT_LEN)


def _bench_serve(plan: MeasurePlan, port: int, seed: int) -> float:
    """Output tokens a second, as the clients got them.

    Raises:
        EngineFailed: the client failed, or not all requests succeeded.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            f"--port={port}", *_flags(seed), "--ready-check-timeout-sec=0", "--disable-tqdm",
            "--save-result", f"--result-dir={folder}", "--result-filename=result.json",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=plain_environment(),
                timeout=plan.timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise EngineFailed("vllm bench serve did not end in time") from None
        if done.returncode:
            raise EngineFailed(f"vllm bench serve: {done.stderr.strip()[-300:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != STREAMS or result["total_output_tokens"] != STREAMS * OUTPUT_LEN:
        raise EngineFailed(f"vllm bench serve: only {result['completed']} requests succeeded")
    return result["output_throughput"]

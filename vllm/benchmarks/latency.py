# SPDX-License-Identifier: Apache-2.0
"""`vllm bench latency`: how long one batch takes, from the prompts to the last token."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.benchmarks import cli_args, report
from vllm.benchmarks.compare import checked_run, compare
from vllm.benchmarks.engine import VllmEngine
from vllm.benchmarks.process import engine_processes
from vllm.benchmarks.workload import Workload
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

BRIEF_HELP = f"""\
  --batch-size N [N ...]      prompts at once
  --input-len, --output-len   tokens of each prompt, and of what follows
  --num-iters, --num-iters-warmup
{cli_args.SHARED_BRIEF_HELP}"""
_COMPARE = cli_args.COMPARE_DEFAULTS
_NUM_ITERS = 30
_NUM_ITERS_WARMUP = 10
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench latency`."""
    parser.add_argument("--input-len", type=int, default=32, help="Tokens of each prompt.")
    parser.add_argument("--output-len", type=int, default=128, help="Tokens to generate for each.")
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[8],
        help="Prompts at once; several sizes: one after the other.",
    )
    parser.add_argument(
        "--num-iters",
        type=int,
        help=f"Runs to measure (default: {_NUM_ITERS}; with --compare {_COMPARE.num_iters}).",
    )
    parser.add_argument(
        "--num-iters-warmup",
        type=int,
        help=f"Runs before (default: {_NUM_ITERS_WARMUP}; "
        f"with --compare {_COMPARE.num_iters_warmup}).",
    )
    cli_args.add_shared_args(parser)


def validate(args: argparse.Namespace) -> None:
    """Checks the flags and fills in the defaults that depend on others.

    Raises:
        ValueError: one line that says what to change.
    """
    cli_args.validate_shared_args(args)
    if args.num_iters is None:
        args.num_iters = _COMPARE.num_iters if args.compare else _NUM_ITERS
    if args.num_iters_warmup is None:
        args.num_iters_warmup = _COMPARE.num_iters_warmup if args.compare else _NUM_ITERS_WARMUP
    for name in ("num_iters", "input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.batch_size) < 1 or args.num_iters_warmup < 0:
        raise ValueError("--batch-size must be at least 1 and --num-iters-warmup at least 0")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    model_config = EngineArgs.from_cli_args(args).create_model_config()
    shapes = [(batch_size, args.input_len, args.output_len) for batch_size in args.batch_size]
    workloads = cli_args.make_workloads(
        model_config, args.seed, shapes, args.random_range_ratio
    )
    specs = cli_args.make_specs(args, model_config)
    if args.compare:
        texts, results = _compare(args, specs, workloads)
    else:
        engine = specs[0].build()
        measured = [_measure(args, engine, workload) for workload in workloads]
        texts, results = [text for text, _ in measured], [result for _, result in measured]
    result = results[0] if len(results) == 1 else results
    report.emit("\n\n".join(texts), result, args.json, args.output_json)


def _compare(
    args: argparse.Namespace, specs: list[Any], workloads: list[Workload]
) -> tuple[list[str], list[dict[str, Any]]]:
    with engine_processes(specs) as engines:
        comparisons = [
            compare(engines, workload, args.num_iters, args.num_iters_warmup, logger.info)
            for workload in workloads
        ]
    texts = [report.comparison_text(comparison) for comparison in comparisons]
    return texts, [{"benchmark": "latency", **report.comparison_json(c)} for c in comparisons]


def _measure(
    args: argparse.Namespace, engine: VllmEngine, workload: Workload
) -> tuple[str, dict[str, Any]]:
    from tqdm import tqdm

    engine.prepare(workload)
    for _ in tqdm(range(args.num_iters_warmup), desc="Warm-up iterations"):
        checked_run(engine, workload)
    seconds = [
        checked_run(engine, workload).seconds
        for _ in tqdm(range(args.num_iters), desc="Bench iterations")
    ]
    values = np.percentile(seconds, _PERCENTILES).tolist()
    percentiles = dict(zip(_PERCENTILES, values, strict=True))
    lines = [report.workload_line(workload), f"Avg latency: {statistics.mean(seconds):.4f} seconds"]
    lines += [f"{p}% percentile latency: {value:.4f} seconds" for p, value in percentiles.items()]
    profile = engine.profile(workload) if args.profile else None
    if profile is not None:
        lines.append(profile.text())
    return "\n".join(lines), {
        "benchmark": "latency",
        **report.workload_json(workload),
        **({} if profile is None else {"profile_milliseconds": profile.milliseconds}),
        "avg_latency": statistics.mean(seconds),
        "latencies": seconds,
        "percentiles": percentiles,
    }

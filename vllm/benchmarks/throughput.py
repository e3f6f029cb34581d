# SPDX-License-Identifier: Apache-2.0
"""`vllm bench throughput`: requests and tokens a second, all requests handed in at once."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vllm.benchmarks import cli_args, report
from vllm.benchmarks.compare import checked_run, compare
from vllm.benchmarks.process import engine_processes
from vllm.benchmarks.workload import Workload
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

BRIEF_HELP = f"""\
  --num-prompts N             requests, all at once
  --input-len, --output-len   tokens of each prompt, and of what follows
  --dataset-name random       where prompts come from
  --num-iters N               runs; the median counts
{cli_args.SHARED_BRIEF_HELP}"""
_COMPARE = cli_args.COMPARE_DEFAULTS


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench throughput`."""
    parser.add_argument(
        "--dataset-name", choices=("random",), default="random", help="Where prompts come from."
    )
    parser.add_argument("--input-len", type=int, default=128, help="Tokens of each prompt.")
    parser.add_argument("--output-len", type=int, default=128, help="Tokens to generate for each.")
    parser.add_argument("--num-prompts", type=int, default=32, help="Requests, all at once.")
    parser.add_argument(
        "--num-iters",
        type=int,
        help=f"Runs, the median counts (default: 1; with --compare {_COMPARE.num_iters}).",
    )
    cli_args.add_shared_args(parser)


def validate(args: argparse.Namespace) -> None:
    """Checks the flags and fills in the defaults that depend on others.

    Raises:
        ValueError: one line that says what to change.
    """
    cli_args.validate_shared_args(args)
    if args.num_iters is None:
        args.num_iters = _COMPARE.num_iters if args.compare else 1
    for name in ("num_iters", "num_prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    model_config = EngineArgs.from_cli_args(args).create_model_config()
    shape = (args.num_prompts, args.input_len, args.output_len)
    (workload,) = cli_args.make_workloads(
        model_config, args.seed, [shape], args.random_range_ratio
    )
    specs = cli_args.make_specs(args, model_config)
    measure = _compare if args.compare else _measure
    text, result = measure(args, specs, workload)
    report.emit(text, {"benchmark": "throughput", **result}, args.json, args.output_json)


def _compare(
    args: argparse.Namespace, specs: list[Any], workload: Workload
) -> tuple[str, dict[str, Any]]:
    with engine_processes(specs) as engines:
        comparison = compare(
            engines, workload, args.num_iters, _COMPARE.num_iters_warmup, logger.info
        )
    return report.comparison_text(comparison), report.comparison_json(comparison)


def _measure(
    args: argparse.Namespace, specs: list[Any], workload: Workload
) -> tuple[str, dict[str, Any]]:
    import statistics

    from tqdm import tqdm

    engine = specs[0].build()
    engine.prepare(workload)
    elapsed = statistics.median(
        checked_run(engine, workload).seconds
        for _ in tqdm(range(args.num_iters), desc="Bench iterations")
    )
    total_tokens = workload.num_input_tokens + workload.num_output_tokens
    result = {
        **report.workload_json(workload),
        "elapsed_time": elapsed,
        "total_num_tokens": total_tokens,
        "requests_per_second": workload.num_prompts / elapsed,
        "tokens_per_second": total_tokens / elapsed,
        "output_tokens_per_second": workload.num_output_tokens / elapsed,
    }
    text = (
        f"{report.workload_line(workload)}\n"
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    if args.profile:
        profile = engine.profile(workload)
        result["profile_milliseconds"] = profile.milliseconds
        text += f"\n{profile.text()}"
    return text, result

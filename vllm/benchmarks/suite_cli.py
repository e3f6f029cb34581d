# SPDX-License-Identifier: Apache-2.0
"""`vllm bench compare`: this engine and every other that is installed, on the same prompts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.benchmarks import cli_args, report
from vllm.benchmarks.bounds import BoundsSpec
from vllm.benchmarks.engine import VllmSpec
from vllm.benchmarks.peers import PEERS, PRECISIONS, PeerOptions, make_peer, missing_reason
from vllm.benchmarks.process import engine_processes
from vllm.benchmarks.suite import TASKS, make_task
from vllm.benchmarks.suite_report import svg, table_json, table_text
from vllm.benchmarks.suite_run import run_task
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

BRIEF_HELP = """\
  --model MODEL               folder or .gguf file; left out: the embedded one
  --workload NAME [NAME ...]  s1, b8, b32, b64, prefix; left out: all
  --peers NAME [NAME ...]     left out: all that are installed
  --precision bf16|int8|int4  of weights, ours and the peers'
  --upstream-python PATH      the interpreter of an environment with upstream's vllm
  --openvino-model DIR        the model as optimum-intel exported it, in its precision
  --num-iters N               rounds; medians count
  --json, --output-json FILE, --plot FILE.svg"""
_MAX_MODEL_LEN = 2048


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench compare`."""
    parser.add_argument(
        "--workload", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="What is run."
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="Left out: all that run here.")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="Of weights. int8, int4: ours by --quantization of that name.",
    )
    parser.add_argument("--upstream-python", metavar="PATH", help="Python of upstream's own.")
    parser.add_argument(
        "--openvino-model",
        metavar="DIR",
        help="OpenVINO's form of the model and its tokenizer, exported elsewhere.",
    )
    parser.add_argument("--num-iters", type=int, default=5, help="Rounds; medians count.")
    parser.add_argument("--plot", metavar="FILE", help="Write a bar chart to FILE, as SVG.")
    parser.add_argument("--json", action="store_true", help="Print the results as JSON alone.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the results to FILE as JSON.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True, max_model_len=_MAX_MODEL_LEN)


def validate(args: argparse.Namespace) -> None:
    """Checks what the parser cannot.

    Raises:
        ValueError: one line that says what to change.
    """
    if args.num_iters < 1:
        raise ValueError("--num-iters must be at least 1")
    if args.precision != "bf16" and args.quantization not in (None, args.precision):
        raise ValueError("--precision and --quantization say different things: give one of them")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    model_config = EngineArgs.from_cli_args(args).create_model_config()
    excluded = cli_args.special_ids(model_config)
    vocab_size = model_config.get_vocab_size()
    tasks = [make_task(name, vocab_size, args.seed, excluded) for name in args.workload]
    tables = []
    with engine_processes(_specs(args, model_config), may_fail=True) as engines:
        probe, *measured = engines
        measured = [engine for engine in measured if engine.is_built]
        weight_bytes = measured[0].weight_bytes()
        for task in tasks:
            tables.append(run_task(measured, task, args.num_iters, probe.bounds, logger.info))
            print(table_text(tables[-1], weight_bytes), file=sys.stderr, flush=True)
        ready = {engine.name: engine.ready_seconds for engine in measured}
    text = "\n\n".join(table_text(table, weight_bytes) for table in tables)
    text += "\n\nready after: " + ", ".join(f"{name} {s:.1f} s" for name, s in ready.items())
    result = {
        "benchmark": "compare",
        "precision": args.precision,
        "ready_seconds": ready,
        "tasks": [table_json(table, weight_bytes) for table in tables],
    }
    if args.plot:
        Path(args.plot).write_text(svg(tables))
    report.emit(text, result, args.json, args.output_json)


def _specs(args: argparse.Namespace, model_config: ModelConfig) -> list:
    """The probe, our engine, the peers. One that was named but cannot run is an error, one that was
    not is left out with a line that says why."""
    engine_args = dataclasses.replace(
        EngineArgs.from_cli_args(args), model=model_config.model, dtype=model_config.dtype
    )
    if args.precision != "bf16":
        engine_args = dataclasses.replace(engine_args, quantization=args.precision)
    options = PeerOptions(
        model_config.model,
        model_config.dtype,
        args.precision,
        model_config.max_model_len,
        args.upstream_python,
        args.openvino_model,
    )
    specs = [BoundsSpec(), VllmSpec(engine_args)]
    for name in PEERS if args.peers is None else args.peers:
        reason = missing_reason(name, options)
        if reason is None:
            specs.append(make_peer(name, options))
        elif args.peers is not None:
            raise ValueError(f"the peer {name} {reason}")
        else:
            logger.warning("%s is left out: %s", name, reason)
    return specs


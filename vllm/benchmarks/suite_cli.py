# SPDX-License-Identifier: Apache-2.0
"""`vllm bench compare`: this engine and every other that is installed, on the same prompts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.benchmarks.peers import PEERS, PRECISIONS
from vllm.benchmarks.suite import WORKLOAD_NAMES
from vllm.benchmarks.transformers_peer import PEER_CACHES
from vllm.engine.arg_utils import EngineArgs

if TYPE_CHECKING:
    from vllm.benchmarks.suite_results import SuiteReport
    from vllm.utils.argparse_utils import FlexibleArgumentParser

BRIEF_HELP = """\
  --model MODEL               folder or .gguf file; left out: the embedded one
  --workload NAME [NAME ...]  s1, b8, b32, b64, prefix; s1-int8, s1-int4; bart (1, 8, 32 streams);
                              http, growth, ready: of this engine alone; left out: all
  --peers NAME [NAME ...]     transformers, openvino-genai, ctranslate2, llama-cpp, upstream; left
                              out: all that are installed
  --precision bf16|int8|int4  of weights, ours and the peers'; or --quantization, for the same
  --upstream-python PATH      the interpreter of an environment with upstream's vllm
  --exporter-python PATH      of one where optimum-intel works, to convert models for OpenVINO
  --openvino-model DIR        the model as it was exported elsewhere, in its precision
  --num-iters N               rounds; medians count
  --time-limit SECONDS        of the whole run: fewer rounds where they take too long
  --peer-cache NAME           Transformers' KV cache; left out: the fastest by trial: slow
  --output-json FILE          written after each workload; --resume goes on from there
  --json, --markdown, --plot FILE.svg, --from-json FILE"""
_MAX_MODEL_LEN = 2048
_PRECISION_OF_GGUF = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench compare`."""
    _add_engine_choices(parser)
    add = parser.add_argument
    add("--num-iters", type=int, default=5, help="Rounds; medians count.")
    add(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="Of the whole run, about. A workload's part of it is shared evenly by its engines: "
        "one that has used up its share takes no further round, after one at the least.",
    )
    add(
        "--peer-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="An engine that takes longer for one answer is ended, and left out from there.",
    )
    add("--output-json", metavar="FILE", help="Write the results to FILE after each workload.")
    add(
        "--resume",
        action="store_true",
        help="Keep what --output-json's file has; what failed is done again.",
    )
    add("--from-json", metavar="FILE", help="Measure nothing: print the results in FILE.")
    add("--json", action="store_true", help="Print the results as JSON alone.")
    add("--markdown", action="store_true", help="Print them as Markdown tables.")
    add("--plot", metavar="FILE", help="Write a bar chart to FILE, as SVG.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_stats=True, max_model_len=_MAX_MODEL_LEN)


def _add_engine_choices(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOAD_NAMES, help="What is run; left out: all.")
    add("--peers", nargs="*", choices=PEERS, help="Left out: all that run here.")
    add(
        "--precision",
        choices=PRECISIONS,
        help="Of weights, ours by --quantization of that name (left out: what --quantization "
        "says, or else bf16).",
    )
    add("--upstream-python", metavar="PATH", help="Python of upstream's own environment.")
    add(
        "--exporter-python",
        metavar="PATH",
        help="Python of an environment with optimum-intel, where this one has none that works.",
    )
    add(
        "--openvino-model",
        metavar="DIR",
        help="OpenVINO's form of the model, exported elsewhere; not of bart.",
    )
    add(
        "--peer-cache",
        choices=("auto", *PEER_CACHES),
        default="auto",
        help="KV cache of Transformers; auto: each is tried and the fastest is measured.",
    )


def validate(args: argparse.Namespace) -> None:
    """Checks what the parser cannot, and settles the precision.

    Raises:
        ValueError: one line that says what to change.
    """
    if args.num_iters < 1:
        raise ValueError("--num-iters must be at least 1")
    for name in ("time_limit", "peer_timeout"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0")
    if args.resume and not args.output_json:
        raise ValueError("--resume goes on from the file of --output-json: give that too")
    if args.json and args.markdown:
        raise ValueError("--json and --markdown: give one of them")
    if args.quantization in ("int8", "int4") and args.precision is None:
        args.precision = args.quantization
    if args.precision and args.quantization not in (None, "gguf", args.precision):
        raise ValueError("--precision and --quantization say different things: give one of them")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    from vllm.benchmarks import suite_results

    if args.from_json:
        report = suite_results.read_report(args.from_json)
    else:
        report = _measure(args)
    if args.plot:
        from vllm.benchmarks.suite_svg import svg

        Path(args.plot).write_text(svg(report))
    print(_text(args, report))


def _text(args: argparse.Namespace, report: SuiteReport) -> str:
    if args.json:
        from vllm.benchmarks.suite_results import to_json

        return to_json(report)
    if args.markdown:
        from vllm.benchmarks.suite_markdown import report_markdown

        return report_markdown(report)
    from vllm.benchmarks.suite_report import report_text

    return report_text(report)


def _measure(args: argparse.Namespace) -> SuiteReport:
    from vllm.benchmarks.suite_all import Suite, SuiteOptions
    from vllm.benchmarks.suite_results import read_report

    model_config = EngineArgs.from_cli_args(args).create_model_config()
    engine_args = dataclasses.replace(
        EngineArgs.from_cli_args(args), model=model_config.model, dtype=model_config.dtype
    )
    options = SuiteOptions(
        engine_args=dataclasses.replace(engine_args, quantization=args.quantization),
        precision=args.precision or _file_precision(args, model_config.model),
        workloads=None if args.workload is None else tuple(args.workload),
        peers=None if args.peers is None else tuple(args.peers),
        num_iters=args.num_iters,
        time_limit_s=args.time_limit,
        timeout_s=args.peer_timeout,
        upstream_python=args.upstream_python,
        exporter_python=args.exporter_python,
        openvino_model=args.openvino_model,
        transformers_cache=None if args.peer_cache == "auto" else args.peer_cache,
        output_json=args.output_json,
    )
    before = None
    if args.resume and Path(args.output_json).exists():
        before = read_report(args.output_json)
    report = Suite(options, model_config, before).run()
    if args.output_json:
        print(f"wrote {args.output_json}", file=sys.stderr)
    return report


def _file_precision(args: argparse.Namespace, model: str) -> str:
    """bf16; of a GGUF file whose weights are kept as they are, what comes next to them."""
    if args.quantization != "gguf":
        return "bf16"
    from vllm.benchmarks.peers.model_files import gguf_kind

    return _PRECISION_OF_GGUF.get(gguf_kind(model), "bf16")

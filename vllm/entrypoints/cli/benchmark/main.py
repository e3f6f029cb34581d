# SPDX-License-Identifier: Apache-2.0
"""`vllm bench NAME`: a subcommand a benchmark, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from vllm.engine.unsupported_args import UNSUPPORTED_ENGINE_FLAGS
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Benchmark:
    """A module with BRIEF_HELP, `add_cli_args(parser)`, `validate(args)` and `main(args)`."""

    module: str
    help: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


BENCHMARKS = {
    "compare": _Benchmark(
        "vllm.benchmarks.suite_cli", "This engine beside others that are installed, and bounds."
    ),
    "kernels": _Benchmark(
        "vllm.benchmarks.kernels", "Attention of one layer, beside torch's, by the bandwidth."
    ),
    "kv-transfer": _Benchmark(
        "vllm.benchmarks.kv_transfer", "Pages of one process read by another, beside a plain READ."
    ),
    "latency": _Benchmark("vllm.benchmarks.latency", "How long one batch takes, start to end."),
    "serve": _Benchmark("vllm.benchmarks.serve", "A running server under load, by its clients."),
    "throughput": _Benchmark(
        "vllm.benchmarks.throughput", "Requests and tokens a second, all requests at once."
    ),
}


class BenchmarkSubcommand(CLISubcommand):
    """`vllm bench`."""

    name = "bench"

    @staticmethod
    def cmd(args: argparse.Namespace) -> int | None:
        if args.bench_type is None:
            args.parser.print_help()
            return 2
        from vllm.benchmarks.process import EngineFailed

        try:
            BENCHMARKS[args.bench_type].load().main(args)
        except (ValueError, EngineFailed) as error:
            logger.debug("bench %s failed", args.bench_type, exc_info=True)
            message = " ".join(str(error).split())
            args.parser.exit(1, f"vllm bench {args.bench_type}: error: {message}\n")
        return 0

    def validate(self, args: argparse.Namespace) -> None:
        if args.bench_type is not None:
            BENCHMARKS[args.bench_type].load().validate(args)

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name, help="Measure throughput and latency, beside a peer."
        )
        benchmarks = parser.add_subparsers(
            dest="bench_type", metavar="BENCHMARK", title="benchmarks"
        )
        for name, benchmark in BENCHMARKS.items():
            if name not in sys.argv[1:]:
                benchmarks.add_parser(name, help=benchmark.help)
                continue
            module = benchmark.load()
            added = benchmarks.add_parser(
                name,
                help=benchmark.help,
                description=benchmark.help,
                usage=f"vllm bench {name} [flags]",
                brief_help=f"{benchmark.help}\n\n{module.BRIEF_HELP}",
                refused_flags=UNSUPPORTED_ENGINE_FLAGS,
            )
            module.add_cli_args(added)
        return parser


def cmd_init() -> list[CLISubcommand]:
    """The subcommand, for the command line's table."""
    return [BenchmarkSubcommand()]

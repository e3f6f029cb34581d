# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-layout`: which bytes each layer's pages own, without starting an engine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.unsupported_args import UNSUPPORTED_ENGINE_FLAGS
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.platforms.planned import PLANNED_PLATFORMS

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.worker.kv_cache_places import KVCacheReport

DESCRIPTION = "Show where the pages of a model's KV cache lie, and whether layers may share."
BRIEF_HELP = f"""\
{DESCRIPTION}
Loads no weights and needs no device. Exit status: 0 if a start would pass, 1 if it would be refused.

  MODEL                       a folder, a .gguf file, or the name of a cached hub model; left out:
                              the embedded model
  --platform NAME             {", ".join(PLANNED_PLATFORMS)}: plan for that, here or not
  --format text|svg|json      text by default
  --explain A B               why two layers, by a part of their names, may share an allocation
  --unaligned                 each cache as its backend would lay it out by itself
  --num-gpu-blocks-override   pages (default: 4, to be drawn)
  --attention-backend, --attention-config, --block-size, --kv-cache-dtype, --dtype
                              as for vllm serve

More: --help=all"""


class KVLayoutSubcommand(CLISubcommand):
    """Prints the report of the KV cache that a start would make."""

    name = "kv-layout"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=DESCRIPTION,
            description=DESCRIPTION,
            usage="vllm kv-layout [MODEL] [flags]",
            brief_help=BRIEF_HELP,
            refused_flags=UNSUPPORTED_ENGINE_FLAGS,
        )
        parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="As for vllm serve.")
        group = parser.add_argument_group("Layout")
        group.add_argument(
            "--platform",
            choices=list(PLANNED_PLATFORMS),
            help="A built-in platform, here or not; left out: this machine's.",
        )
        group.add_argument("--format", choices=["text", "svg", "json"], default="text")
        group.add_argument(
            "--explain",
            nargs=2,
            metavar=("A", "B"),
            help="Two layers: why they may share an allocation or not.",
        )
        group.add_argument(
            "--unaligned",
            action="store_true",
            help="Each cache as its backend would lay it out by itself.",
        )
        return EngineArgs.add_cli_args(parser)

    def validate(self, args: argparse.Namespace) -> None:
        if args.model_tag is not None:
            if args.model and args.model != args.model_tag:
                raise ValueError(
                    f"two models are named, {args.model_tag!r} and --model {args.model!r}; pass one"
                )
            args.model = args.model_tag
        if args.explain and args.format != "text":
            raise ValueError(f"--explain has text alone, not --format {args.format}")

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        from vllm.entrypoints.kv_layout import plan_kv_layout

        try:
            engine_args = EngineArgs.from_cli_args(args)
            report = plan_kv_layout(engine_args, args.platform, not args.unaligned)
            print(_render(report, args), end="")
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0 if report.is_sound else 1


def _render(report: KVCacheReport, args: argparse.Namespace) -> str:
    from vllm.v1.worker.kv_cache_drawing import draw_svg
    from vllm.v1.worker.kv_cache_explain import as_text, as_values, explain

    if args.explain:
        return explain(report, *args.explain) + "\n"
    if args.format == "svg":
        return draw_svg(report)
    if args.format == "json":
        return json.dumps(as_values(report), indent=2) + "\n"
    return as_text(report) + "\n"


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [KVLayoutSubcommand()]

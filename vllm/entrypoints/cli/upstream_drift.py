# SPDX-License-Identifier: Apache-2.0
"""`vllm upstream-drift`: what a release of upstream still has of this project's public names."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.entrypoints.upstream_drift.compare import Finding
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = "Compare this project's public names and signatures with a release of upstream."


class UpstreamDriftSubcommand(CLISubcommand):
    """Prints what changed, moved or is gone there. Exit status 1 if anything did."""

    name = "upstream-drift"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=DESCRIPTION,
            description=f"{DESCRIPTION} Both are imported and asked; no source is read. Exit status: "
            "0 without drift, 1 with, 2 if it could not be found out.",
            usage="vllm upstream-drift --against RELEASE|PATH [flags]",
        )
        parser.add_argument(
            "--against",
            required=True,
            metavar="RELEASE|PATH",
            help="A release (installed once into the cache folder, some 0.4 GB), the Python or the folder "
            "of an environment that has one, or a folder with vllm in it.",
        )
        parser.add_argument(
            "--base",
            metavar="RELEASE|PATH",
            help="Another one, for example 0.28.0: what became since of the names that it shares with "
            "this project, whatever this project left out or added. For pipelines.",
        )
        parser.add_argument(
            "--module",
            action="append",
            metavar="PREFIX",
            help="Only modules that begin so; may be repeated. For example vllm.platforms.",
        )
        parser.add_argument("--format", choices=["text", "json"], default="text")
        parser.add_argument(
            "--all", action="store_true", help="Also list names that are the same or only here."
        )
        return parser

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        from vllm.entrypoints.upstream_drift.compare import DRIFTED
        from vllm.entrypoints.upstream_drift.report import find_drift

        try:
            findings = find_drift(args.against, args.module or ["vllm"], args.base)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        shown = [f for f in findings if args.all or f.status in (*DRIFTED, "unknown")]
        print(_render(findings, shown, args), end="")
        return 1 if any(f.status in DRIFTED for f in findings) else 0


def _render(findings: list[Finding], shown: list[Finding], args: argparse.Namespace) -> str:
    from vllm.entrypoints.upstream_drift.report import as_text

    if args.format == "json":
        return json.dumps([asdict(finding) for finding in shown], indent=2) + "\n"
    return as_text(findings, shown, args.against, args.base)


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [UpstreamDriftSubcommand()]

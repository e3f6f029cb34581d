# SPDX-License-Identifier: Apache-2.0
"""`vllm disagg-proxy`: one address before prefill and decode servers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = "Serve one address before prefill and decode servers, for local use and tests."
_DRAIN_TIMEOUT_S = 30


class DisaggProxySubcommand(CLISubcommand):
    """Runs the proxy until it is told to stop."""

    name = "disagg-proxy"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=DESCRIPTION,
            description=DESCRIPTION,
            usage="vllm disagg-proxy --prefill URL [URL ...] --decode URL [URL ...] [flags]",
        )
        for kind, what in (
            ("prefill", "compute prompts"),
            ("decode", "load their keys and values and answer"),
        ):
            parser.add_argument(
                f"--{kind}",
                nargs="+",
                required=True,
                metavar="URL",
                help=f"Servers that {what}, such as http://localhost:8100; they take turns.",
            )
        parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
        parser.add_argument("--port", type=int, default=8000, help="Port; 0: any free one.")
        return parser

    def validate(self, args: argparse.Namespace) -> None:
        for url in (*args.prefill, *args.decode):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no URL such as http://localhost:8100")

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        from vllm.entrypoints.disagg_proxy import build_proxy
        from vllm.entrypoints.launcher import make_server
        from vllm.entrypoints.sockets import base_url, create_server_socket

        try:
            sock = create_server_socket(args.host, args.port)
        except OSError as error:
            print(f"error: {error.strerror}", file=sys.stderr)
            return 1
        with sock:
            server = make_server(
                build_proxy(args.prefill, args.decode),
                on_ready=lambda: print(f"ready: {base_url(sock)}", flush=True),
                drain_timeout_s=_DRAIN_TIMEOUT_S,
            )
            asyncio.run(server.serve(sockets=[sock]))
        return server.status


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [DisaggProxySubcommand()]

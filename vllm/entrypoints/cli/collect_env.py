# SPDX-License-Identifier: Apache-2.0
"""`vllm collect-env`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class CollectEnvSubcommand(CLISubcommand):
    """Prints what a report of a fault should hold."""

    name = "collect-env"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        text = "Tell what this machine has, for a report."
        return subparsers.add_parser(self.name, help=text, description=text)

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        from vllm.entrypoints.collect_env import get_env_info

        print(get_env_info())
        return 0


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [CollectEnvSubcommand()]

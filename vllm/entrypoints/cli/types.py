# SPDX-License-Identifier: Apache-2.0
"""What a subcommand of `vllm` is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class CLISubcommand:
    """A subcommand. Its module offers `cmd_init() -> list[CLISubcommand]`.

    Modules are imported for their own subcommand only, and must still not import torch: what a
    command needs to run is imported inside `cmd`.
    """

    name: str

    @staticmethod
    def cmd(args: argparse.Namespace) -> int | None:
        """Runs the command; returns its exit status, None meaning 0."""
        raise NotImplementedError

    def validate(self, args: argparse.Namespace) -> None:
        """Checks what the parser cannot.

        Raises:
            ValueError: shown as one line; the exit status is 2.
        """

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        """Adds this command's parser and its flags; returns that parser."""
        raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command."""

from __future__ import annotations

import importlib
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import module_exists
from vllm.version import __version__

if TYPE_CHECKING:
    import argparse

    from vllm.entrypoints.cli.types import CLISubcommand


@dataclass(frozen=True)
class _Command:
    """What the top-level help tells of a subcommand without importing its module."""

    module: str
    help: str


COMMANDS = {
    "serve": _Command(
        "vllm.entrypoints.cli.serve", "Serve a model over an OpenAI-compatible HTTP API."
    ),
    "bench": _Command(
        "vllm.entrypoints.cli.benchmark.main", "Measure throughput and latency, beside a peer."
    ),
}

EPILOG = """\
examples:
  vllm serve                        the small embedded model, on port 8000
  vllm serve ./my-model --port 8080 a folder with a Hugging Face checkpoint
  vllm serve model.gguf             a GGUF file
  vllm serve --help                 the flags of a command (--help=all: every one)
"""


def main() -> None:
    """Runs the command line of this process; exits with the command's status."""
    argv = sys.argv[1:]
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    parser, commands = _make_parser(wanted)
    args = parser.parse_args(argv)
    if args.subparser not in commands:
        parser.print_help()
        sys.exit(0 if not argv else 2)
    command, command_parser = commands[args.subparser]
    args.parser = command_parser
    sys.exit(_run(command, args))


def _run(command: CLISubcommand, args: argparse.Namespace) -> int:
    try:
        command.validate(args)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        return command.cmd(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone (`vllm ... | head`): nobody is left to tell.
        sys.stderr.close()
        return 128 + signal.SIGPIPE


def _make_parser(
    wanted: str | None,
) -> tuple[FlexibleArgumentParser, dict[str, tuple[CLISubcommand, FlexibleArgumentParser]]]:
    """The parser, with the flags of subcommand `wanted` alone."""
    import argparse

    parser = FlexibleArgumentParser(
        prog="vllm",
        description="vLLM, compact: serves language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="subparser", metavar="COMMAND", title="commands")
    made: dict[str, tuple[CLISubcommand, FlexibleArgumentParser]] = {}
    for name, entry in COMMANDS.items():
        if not module_exists(entry.module):
            continue
        if name != wanted:
            subparsers.add_parser(name, help=entry.help)
            continue
        for command in importlib.import_module(entry.module).cmd_init():
            made[command.name] = (command, command.subparser_init(subparsers))
    return parser, made


def fail(message: str, status: int = 1) -> NoReturn:
    """Says what went wrong in one line and exits."""
    print(f"vllm: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()

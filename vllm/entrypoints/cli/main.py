# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.config_file import apply_config_file
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import module_exists
from vllm.version import __version__

if TYPE_CHECKING:
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
    "chat": _Command("vllm.entrypoints.cli.openai", "Talk with the model of a running server."),
    "complete": _Command("vllm.entrypoints.cli.openai", "Let a running server continue texts."),
    "bench": _Command(
        "vllm.entrypoints.cli.benchmark.main",
        "Measure throughput and latency, of engines and of servers.",
    ),
    "kv-layout": _Command(
        "vllm.entrypoints.cli.kv_layout", "Show where the pages of a model's KV cache lie."
    ),
    "disagg-proxy": _Command(
        "vllm.entrypoints.cli.disagg_proxy",
        "Serve one address before prefill and decode servers.",
    ),
    "upstream-drift": _Command(
        "vllm.entrypoints.cli.upstream_drift",
        "Compare the public names here with a release of upstream.",
    ),
    "collect-env": _Command(
        "vllm.entrypoints.cli.collect_env", "Tell what this machine has, for a report."
    ),
}

EPILOG = """\
examples:
  vllm serve                        the small embedded model, on port 8000
  vllm serve ./my-model --port 8080 a folder with a Hugging Face checkpoint
  vllm serve model.gguf             a GGUF file
  vllm chat                         talk with it, in another terminal
  vllm serve --help                 the flags of a command (--help=all: every one)
"""


def main() -> None:
    """Runs the command line of this process; exits with the command's status."""
    try:
        sys.exit(_main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output is gone (`vllm ... | head`): nobody is left to tell, and the
        # interpreter must not try when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _main(argv: list[str]) -> int:
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    parser, commands = _make_parser(wanted)
    if wanted in commands and wanted == "serve":
        _, command_parser = commands[wanted]
        try:
            apply_config_file(command_parser, argv)
        except ValueError as error:
            command_parser.error(str(error))
    args = parser.parse_args(argv)
    if args.subparser not in commands:
        parser.print_help()
        return 0 if not argv else 2
    command, command_parser = commands[args.subparser]
    args.parser = command_parser
    try:
        command.validate(args)
    except ValueError as error:
        command_parser.error(str(error))
    return command.cmd(args) or 0


def _make_parser(
    wanted: str | None,
) -> tuple[FlexibleArgumentParser, dict[str, tuple[CLISubcommand, FlexibleArgumentParser]]]:
    """The parser, with the flags of subcommand `wanted` alone."""
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
            if command.name == name:  # a module may hold several
                made[name] = (command, command.subparser_init(subparsers))
    return parser, made


if __name__ == "__main__":
    main()

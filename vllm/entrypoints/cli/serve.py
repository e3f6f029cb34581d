# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.unsupported_args import UNSUPPORTED_ENGINE_FLAGS, UNSUPPORTED_SERVER_FLAGS
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.openai.cli_args import FrontendArgs, make_arg_parser
from vllm.logger import init_logger, set_log_level
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.startup_timer import startup_timer
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

DESCRIPTION = "Serve a model over an OpenAI-compatible HTTP API."
BRIEF_HELP = f"""\
{DESCRIPTION}

  MODEL                       a folder, a .gguf file, or the name of a cached hub model; left out:
                              the embedded model
  --host, --port              where to listen (default: every interface, port 8000)
  --api-key KEY               ask requests for this key
  --config FILE               flags from a YAML file
  --served-model-name NAME    what the API calls the model
  --dtype, --max-model-len    bfloat16, float32, ...; the longest request in tokens (8k, 32K)
  --kv-cache-memory-bytes     size of the KV cache (4G)
  --log-level debug           says where the time of the start goes

More: --help=all, --help=listgroup, --help=GROUP (Frontend, ModelConfig, ...), --help=WORD (max)"""
_EXIT_USAGE, _EXIT_FAILURE = 2, 1


class ServeSubcommand(CLISubcommand):
    """Starts the engine's process and the HTTP server."""

    name = "serve"

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=DESCRIPTION,
            description=DESCRIPTION,
            usage="vllm serve [MODEL] [flags]",
            brief_help=BRIEF_HELP,
            refused_flags=UNSUPPORTED_ENGINE_FLAGS | UNSUPPORTED_SERVER_FLAGS,
        )
        return make_arg_parser(parser)

    def validate(self, args: argparse.Namespace) -> None:
        if args.model_tag is not None:
            if args.model and args.model != args.model_tag:
                raise ValueError(
                    f"two models are named, {args.model_tag!r} and --model {args.model!r}; pass one"
                )
            args.model = args.model_tag
        FrontendArgs.from_cli_args(args).validate()

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        """Serves until told to stop. Exit status: 0 after a drain, 1 when the server could not
        start or its engine died, 2 when an argument is wrong."""
        startup_timer.record("arguments", startup_timer.began)
        if args.log_level is not None:
            set_log_level(args.log_level)
        for name in envs.unknown_variables():
            logger.warning("%s is set, but has no effect: this build knows no such variable", name)
        frontend = FrontendArgs.from_cli_args(args)
        from vllm.entrypoints.sockets import create_server_socket

        try:
            sock = create_server_socket(frontend.host, frontend.port)
        except OSError as error:
            _fail(error, _EXIT_FAILURE)
        with sock:
            return _serve(AsyncEngineArgs.from_cli_args(args), frontend, sock)


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [ServeSubcommand()]


def _serve(args: AsyncEngineArgs, frontend: FrontendArgs, sock: socket.socket) -> int:
    try:
        engine = _start_engine(args, frontend)
    except ValueError as error:
        _fail(error, _EXIT_USAGE)
    except (RuntimeError, OSError) as error:
        _fail(error, _EXIT_FAILURE)
    try:
        from vllm.entrypoints.openai.api_server import run_server

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(run_server(engine, sock, frontend))
    finally:
        engine.shutdown()


def _start_engine(args: AsyncEngineArgs, frontend: FrontendArgs) -> AsyncLLM:
    """The engine, ready. While its process loads, this one imports the server.

    Raises:
        ValueError: an argument cannot be served.
        RuntimeError: the engine could not start.
    """
    from vllm.entrypoints.chat_utils import load_chat_template

    # Before there is a process to stop again: it takes a few milliseconds where the model is local.
    with startup_timer.phase("config"):
        vllm_config = args.create_engine_config()
        load_chat_template(frontend.chat_template)
    logger.info("vLLM %s: loading %s", __version__, vllm_config.model_config.model)
    from vllm.v1.engine.launch import launch_engine_core

    process = launch_engine_core()
    try:
        with startup_timer.phase("import server"):
            import vllm.entrypoints.openai.api_server  # noqa: F401
            from vllm.v1.engine.async_llm import AsyncLLM
        engine = AsyncLLM.from_vllm_config(
            vllm_config,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            engine_process=process,
        )
    except BaseException:
        process.shutdown()
        raise
    logger.debug("%s", startup_timer.table())
    return engine


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _fail(error: Exception, status: int) -> NoReturn:
    """One line, and the traceback only for who asked for debug logs."""
    logger.debug("the server could not start", exc_info=error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    logging.shutdown()
    print(f"vllm serve: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(status)

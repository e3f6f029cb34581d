# SPDX-License-Identifier: Apache-2.0
"""The flags of `vllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import LOG_LEVELS
from vllm.utils.argparse_utils import FlexibleArgumentParser

UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
DEFAULT_PORT = 8000


@dataclass
class FrontendArgs:
    """What the HTTP server is made from."""

    host: str | None = None
    port: int = DEFAULT_PORT
    api_key: list[str] = field(default_factory=list)
    chat_template: str | None = None
    response_role: str = "assistant"
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> FrontendArgs:
        """The arguments among what was parsed."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})

    @property
    def keys(self) -> list[str]:
        """The keys that let a request pass; none: every request does."""
        from_environ = envs.VLLM_API_KEY
        return [*self.api_key, *([from_environ] if from_environ else [])]

    def validate(self) -> None:
        """
        Raises:
            ValueError: one line that names the flag.
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be from 0 to 65535, not {self.port}")
        if any(not key.strip() for key in self.api_key):
            raise ValueError("--api-key is empty: pass a key, or leave the flag out")


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Adds every flag of `vllm serve` to `parser`."""
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="A folder with a Hugging Face checkpoint, a .gguf file, or the name of a hub model in "
        "the local cache. Left out: the embedded model, if it is installed.",
    )
    _add_frontend_flags(parser)
    return AsyncEngineArgs.add_cli_args(parser)


def _add_frontend_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Frontend", "The HTTP server.")
    group.add_argument(
        "--host", metavar="ADDRESS", help="Address to listen on; left out: every one."
    )
    group.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="Port to listen on; 0: any free one."
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="A key that requests must send; repeat it for several. VLLM_API_KEY adds one. Asked "
        "for on every route but /health and /ping.",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="A Jinja chat template, or a file with one; left out: the model's own.",
    )
    group.add_argument("--response-role", default="assistant", help="The role that answers have.")
    group.add_argument(
        "--log-level",
        type=str.lower,
        choices=LOG_LEVELS,
        help="How much vLLM logs; debug says where the time of a start went. Left out: "
        "VLLM_LOGGING_LEVEL, or info.",
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=UVICORN_LOG_LEVELS,
        default="info",
        help="How much the HTTP server logs.",
    )
    group.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="Do not log each HTTP request."
    )

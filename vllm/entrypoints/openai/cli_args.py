# SPDX-License-Identifier: Apache-2.0
"""The flags of `vllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import LOG_LEVELS
from vllm.utils.argparse_utils import FlexibleArgumentParser

UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
DEFAULT_PORT = 8000
# Python's ssl.CERT_NONE, CERT_OPTIONAL and CERT_REQUIRED.
_CERT_REQS = (0, 1, 2)


@dataclass
class FrontendArgs:
    """What the HTTP server is made from."""

    host: str | None = None
    port: int = DEFAULT_PORT
    api_key: list[str] = field(default_factory=list)
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = False
    root_path: str = ""
    disable_fastapi_docs: bool = False
    allow_credentials: bool = False
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
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
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"--root-path must begin with a slash and not end in one, not {self.root_path!r}"
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials needs --allowed-origins that are named: with '*' every site "
                "could use its visitors' credentials"
            )
        self._validate_tls()

    def _validate_tls(self) -> None:
        if not self.ssl_certfile:
            given = [
                name
                for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
                if getattr(self, name)
            ]
            if given:
                raise ValueError(f"{_flag(given[0])} has no effect without --ssl-certfile")
            return
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        flag, value = "--ssl-certfile", self.ssl_certfile
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            if self.ssl_ca_certs:
                flag, value = "--ssl-ca-certs", self.ssl_ca_certs
                context.load_verify_locations(self.ssl_ca_certs)
            if self.ssl_ciphers:
                flag, value = "--ssl-ciphers", self.ssl_ciphers
                context.set_ciphers(self.ssl_ciphers)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"{flag} {value!r} (with --ssl-keyfile) cannot be used: {error}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    _add_answer_flags(parser)
    _add_access_flags(parser)
    return AsyncEngineArgs.add_cli_args(parser)


def _add_frontend_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Frontend", "The HTTP server.")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="A YAML file with flags as keys (`max-model-len: 8k`, `model: DIR`). What is given on "
        "the command line counts more.",
    )
    group.add_argument(
        "--host", metavar="ADDRESS", help="Address to listen on; left out: every one."
    )
    group.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="Port to listen on; 0: any free one."
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="Path that a proxy puts before the server's own, such as /llm.",
    )
    group.add_argument(
        "--disable-fastapi-docs",
        action="store_true",
        help="No /docs, /redoc and /openapi.json.",
    )
    group.add_argument(
        "--enable-request-id-headers",
        action="store_true",
        help="Answers bear the header X-Request-Id.",
    )
    group.add_argument(
        "--enable-server-load-tracking",
        action="store_true",
        help="Count the requests under way for /load.",
    )
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


def _add_answer_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Answers", "What requests may ask for, and get.")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="A Jinja chat template, or a file with one; left out: the model's own.",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="Run chat templates that requests bring along. They are code, in a sandbox.",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='Variables of the chat template, such as {"enable_thinking": false}; those of a '
        "request count more.",
    )
    group.add_argument("--response-role", default="assistant", help="The role that answers have.")
    group.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="Logprobs name tokens as token_id:5 rather than by their text, unless a request says "
        "otherwise.",
    )
    group.add_argument(
        "--enable-prompt-tokens-details",
        action="store_true",
        help="Usage says how many of the prompt's tokens were found in the prefix cache.",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="Every stream ends with its usage, asked for or not.",
    )


def _add_access_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Access", "Who may ask: keys, other sites' pages, TLS.")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="A key that requests must send; repeat it for several. VLLM_API_KEY adds one. Asked "
        "for on every route but /health and /ping.",
    )
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="CORS: pages of other sites may send their visitors' credentials.",
    )
    for name, what in (
        ("origins", "sites whose pages may read answers"),
        ("methods", "methods that they may use"),
        ("headers", "headers that they may send"),
    ):
        group.add_argument(
            f"--allowed-{name}",
            type=_json_strings,
            default=["*"],
            metavar="JSON",
            help=f'CORS: {what}, such as ["*"].',
        )
    group.add_argument("--ssl-certfile", metavar="FILE", help="Serve HTTPS with this certificate.")
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="Its key; left out: in the same file."
    )
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="Certificates that clients' must be signed with."
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=_CERT_REQS,
        default=0,
        help="Clients' certificates: 0 not asked for, 1 checked where there is one, 2 required.",
    )
    group.add_argument("--ssl-ciphers", metavar="NAMES", help="OpenSSL's names of ciphers.")


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"key": 1}}')
    return value


def _json_strings(text: str) -> list[str]:
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON list of texts such as ["*"]')
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None

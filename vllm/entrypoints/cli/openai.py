# SPDX-License-Identifier: Apache-2.0
"""`vllm chat` and `vllm complete`: a terminal in front of a running OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DEFAULT_URL = "http://localhost:8000/v1"
Message = dict[str, str]


class ServerError(Exception):
    """The server cannot be reached, or refuses; one line for the terminal."""


class Server:
    """An OpenAI-compatible server at `url` (which ends in /v1).

    Raises (every method):
        ServerError: see there.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        key = api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/models") as response:
            cards = json.loads(response.read())["data"]
        if not cards:
            raise ServerError(f"{self._url} serves no model")
        return cards[0]["id"]

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer, piece by piece."""
        body = {"model": self.model, "stream": True, **body}
        with self._open(route, json.dumps(body).encode()) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                message = json.loads(data)
                if "error" in message:
                    raise ServerError(message["error"]["message"])
                yield from message["choices"]

    @contextmanager
    def _open(self, route: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """The response to a GET, or to a POST of `body`."""
        url = self._url + route
        try:
            with urlopen(Request(url, body, self._headers)) as response:
                yield response
        except HTTPError as error:
            raise ServerError(f"{error.code}: {_message_of(error.read())}") from None
        except URLError as error:
            raise ServerError(
                f"cannot reach {url} ({error.reason}): is the server up? Pass its address as --url"
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"the answer of {url} cannot be read: {error}") from None


def _message_of(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")


class _ClientCommand(CLISubcommand):
    """What both have in common: the server's flags, the loop, one line for an error."""

    help: str

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name, help=self.help, description=self.help, usage=f"vllm {self.name} [flags]"
        )
        parser.add_argument("--url", default=DEFAULT_URL, help="The server's API.")
        parser.add_argument(
            "--model-name", metavar="NAME", help="Model to ask; left out: the server's first."
        )
        parser.add_argument(
            "--api-key",
            metavar="KEY",
            help="Its key; left out: OPENAI_API_KEY or VLLM_API_KEY of the environment.",
        )
        self.add_flags(parser)
        return parser

    def add_flags(self, parser: FlexibleArgumentParser) -> None:
        """The command's own flags."""
        raise NotImplementedError

    @classmethod
    def run(cls, args: argparse.Namespace, server: Server) -> None:
        """Asks once with --quick, else until the input ends."""
        raise NotImplementedError


def _run(command: type[_ClientCommand], args: argparse.Namespace) -> int:
    try:
        server = Server(args.url, args.api_key, args.model_name)
        print(f"Using model: {server.model}", file=sys.stderr)
        command.run(args, server)
    except ServerError as error:
        print(f"vllm {command.name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except EOFError:
        pass
    return 0


class ChatCommand(_ClientCommand):
    """`vllm chat`."""

    name = "chat"
    help = "Talk with the model of a running server."

    def add_flags(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument("--system-prompt", metavar="TEXT", help="What the model is told first.")
        parser.add_argument(
            "-q", "--quick", metavar="MESSAGE", help="Say this, print the answer, and leave."
        )

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        return _run(ChatCommand, args)

    @classmethod
    def run(cls, args: argparse.Namespace, server: Server) -> None:
        conversation: list[Message] = []
        if args.system_prompt is not None:
            conversation.append({"role": "system", "content": args.system_prompt})
        if args.quick is not None:
            cls._say(server, conversation, args.quick)
            return
        print("Type a message, or Ctrl-D to leave.", file=sys.stderr)
        while True:
            try:
                cls._say(server, conversation, input("> "))
            except ServerError as error:
                # A message that is refused is no reason to lose the conversation.
                conversation.pop()
                print(f"error: {error}", file=sys.stderr)

    @staticmethod
    def _say(server: Server, conversation: list[Message], text: str) -> None:
        conversation.append({"role": "user", "content": text})
        answer = ""
        for choice in server.stream("/chat/completions", {"messages": conversation}):
            piece = choice["delta"].get("content") or ""
            answer += piece
            print(piece, end="", flush=True)
        print()
        conversation.append({"role": "assistant", "content": answer})


class CompleteCommand(_ClientCommand):
    """`vllm complete`."""

    name = "complete"
    help = "Let a running server continue texts."

    def add_flags(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument("--max-tokens", type=int, help="Tokens to generate at most.")
        parser.add_argument(
            "-q", "--quick", metavar="TEXT", help="Continue this, print it, and leave."
        )

    @staticmethod
    def cmd(args: argparse.Namespace) -> int:
        return _run(CompleteCommand, args)

    @classmethod
    def run(cls, args: argparse.Namespace, server: Server) -> None:
        options = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
        if args.quick is not None:
            cls._complete(server, args.quick, options)
            return
        print("Type a text, or Ctrl-D to leave.", file=sys.stderr)
        while True:
            try:
                cls._complete(server, input("> "), options)
            except ServerError as error:
                print(f"error: {error}", file=sys.stderr)

    @staticmethod
    def _complete(server: Server, text: str, options: dict[str, Any]) -> None:
        for choice in server.stream("/completions", {"prompt": text, **options}):
            print(choice["text"], end="", flush=True)
        print()


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [ChatCommand(), CompleteCommand()]

# SPDX-License-Identifier: Apache-2.0
"""A parser whose errors are one line, and values as people write them: 8k, 1.5G."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)(?:i?[bB])?")
_MULTIPLIER = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def human_readable_int(text: str) -> int:
    """`"8192"`, `"8k"` (8000) and `"8K"` (8192) as numbers; k, m, g, t are powers of 1000 and K, M,
    G, T of 1024. A fraction needs a unit: `"1.5k"`.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or ("." in match[1] and not match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number such as 8192, 8k (8000) or 8K (8192)"
        )
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _MULTIPLIER[match[2]])


def human_readable_int_or_auto(text: str) -> int:
    """As `human_readable_int`; `"auto"` is -1."""
    return -1 if text.strip().lower() == "auto" else human_readable_int(text)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Flags with `-` or `_` between words, never abbreviated; an error is one line and exit code 2.

    Args:
        refused_flags: flags that another build may know: refused as such, not as misspelt.
        brief_help: what `--help` alone shows after the usage line; `--help=all` shows everything,
            `--help=NAME` the group, or the flags, that match NAME. None: `--help` shows everything.
    """

    def __init__(
        self,
        *args: Any,
        refused_flags: Collection[str] = (),
        brief_help: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)
        self.refused_flags = frozenset(refused_flags)
        self.brief_help = brief_help

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = [_dashed(arg) for arg in (sys.argv[1:] if args is None else args)]
        for arg in given:
            if self._subparsers is not None and not arg.startswith("-"):
                break  # the rest is the subcommand's
            if arg.startswith("--help="):
                self._show(self._help_for(arg.removeprefix("--help=")))
        return super().parse_known_args(given, namespace)

    def add_subparsers(self, **kwargs: Any) -> Any:
        """As argparse's; a subcommand's parser refuses what it does not know itself."""
        kwargs.setdefault("parser_class", CommandParser)
        return super().add_subparsers(**kwargs)

    def print_help(self, file: Any = None) -> None:
        """The brief help where there is one, else all of it."""
        if self.brief_help is None:
            super().print_help(file)
        else:
            print(f"{self.format_usage().strip()}\n\n{self.brief_help}", file=file or sys.stdout)

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flag = next((arg for arg in unknown if arg.startswith("-") and len(arg) > 1), None)
        if flag is None:
            self.error(f"unexpected argument {unknown[0]!r}")
        name = flag.split("=", 1)[0]
        positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        if positive in self.refused_flags:
            self.error(f"{name} is not supported by this build")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        close = difflib.get_close_matches(name, known, n=1)
        self.error(
            f"unknown flag {name}; "
            + (f"did you mean {close[0]}?" if close else f"see `{self.prog} --help=all`")
        )

    def _show(self, text: str) -> NoReturn:
        print(text.rstrip("\n"))
        self.exit(0)

    def _help_for(self, what: str) -> str:
        groups = [group for group in self._action_groups if group._group_actions]
        if what.lower() == "all":
            return self.format_help()
        if what.lower() == "listgroup":
            names = "\n".join(f"  {group.title}" for group in groups if group.title)
            return f"{self.format_usage()}\ngroups:\n{names}"
        titles = (what.lower(), what.lower() + "config")
        named = [group for group in groups if (group.title or "").lower() in titles]
        wanted = what.lower().lstrip("-").replace("_", "-")
        if named:
            shown = {named[0]: named[0]._group_actions}
        else:
            shown = {g: [a for a in g._group_actions if _mentions(a, wanted)] for g in groups}
        if not any(shown.values()):
            self.error(f"no flag or group matches {what!r}; see `{self.prog} --help=listgroup`")
        return self._format_groups(shown)

    def _format_groups(self, shown: dict[Any, list[argparse.Action]]) -> str:
        formatter = self._get_formatter()
        for group, actions in shown.items():
            if actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        return formatter.format_help()


class CommandParser(FlexibleArgumentParser):
    """A subcommand's parser: argparse would leave what it does not know to the parser above."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, unknown


class HelpFormatter(argparse.HelpFormatter):
    """Flag, meaning and default, with the meaning on lines of its own."""

    def __init__(self, prog: str, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_help_position", 6)
        super().__init__(prog, *args, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_default = action.default not in (None, False, "", argparse.SUPPRESS, [], {})
        shows = bool(action.option_strings) and has_default and "%(default)" not in text
        return f"{text} (default: %(default)s)" if shows else text


def _dashed(arg: str) -> str:
    """`--max_model_len=8k` -> `--max-model-len=8k`; values keep their underscores."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _mentions(action: argparse.Action, wanted: str) -> bool:
    return any(wanted in option.lstrip("-") for option in action.option_strings)

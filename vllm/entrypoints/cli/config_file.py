# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: flags from a YAML file, as defaults of those on the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser


def apply_config_file(parser: FlexibleArgumentParser, argv: Sequence[str]) -> None:
    """Makes what the file that `argv` names with --config says the defaults of `parser`. A wrong
    value is an error of the parser, as on the command line.

    Raises:
        ValueError: the file cannot be read, or a key of it is no flag.
    """
    path = _config_path(argv)
    if path is None:
        return
    values = _read(path)
    # `model` stands for the positional argument, unless the command line has --model.
    has_model_flag = any(arg == "--model" or arg.startswith("--model=") for arg in argv)
    model = values.pop("model", None)
    flags: list[str] = []
    for key, value in values.items():
        flags += _as_flags(parser, path, str(key), value)
    if model is not None and not has_model_flag:
        flags.append(str(model))
    before = vars(parser.parse_args([]))
    after = vars(parser.parse_args(flags))
    parser.set_defaults(**{name: v for name, v in after.items() if v != before[name]})


def _config_path(argv: Sequence[str]) -> str | None:
    for arg, following in zip(argv, [*argv[1:], None]):
        if arg == "--config":
            return following  # None: the parser says that a value is missing
        if arg.startswith("--config="):
            return arg.removeprefix("--config=")
    return None


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path!r} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"--config {path!r} must hold flags and their values (`port: 8000`)")
    return values


def _as_flags(parser: FlexibleArgumentParser, path: str, key: str, value: Any) -> list[str]:
    """A key and its value as they would stand on the command line."""
    flag = "--" + key.replace("_", "-").lstrip("-")
    actions = parser._option_string_actions
    if flag not in actions or flag == "--config":
        if flag in parser.refused_flags:
            raise ValueError(f"--config {path!r}: {key} is not supported by this build")
        close = difflib.get_close_matches(flag, actions, n=1)
        advice = f"; did you mean {close[0].lstrip('-')}?" if close else ""
        raise ValueError(f"--config {path!r}: there is no flag {flag}{advice}")
    action = actions[flag]
    if value is None:
        return []
    if isinstance(value, bool) and action.nargs == 0:
        off = f"--no-{flag.removeprefix('--')}"
        return [flag] if value else ([off] if off in actions else [])
    if isinstance(value, list) and action.nargs == "+":
        return [flag, *map(_text, value)]
    if isinstance(value, list) and type(action).__name__ == "_AppendAction":
        return [part for item in value for part in (flag, _text(item))]
    return [flag, _text(value)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)

# SPDX-License-Identifier: Apache-2.0
"""Flags from the fields of a config dataclass, and validation errors in the words of the flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from vllm.config import get_attr_docs
from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    human_readable_int,
    human_readable_int_or_auto,
)

# Field documentation is read from the source files; only help shows it.
NEEDS_HELP = any(arg == "-h" or arg.startswith("--help") for arg in sys.argv)


def add_config_flags(
    parser: FlexibleArgumentParser,
    config: type,
    field_of_arg: Mapping[str, str],
    args_class: type,
    short_flags: Mapping[str, str],
) -> None:
    """Adds a group named after `config` with a flag for each argument.

    Args:
        field_of_arg: argument name (`kv_cache_dtype`) -> the field of `config` it sets.
        args_class: the dataclass whose fields give the defaults.
        short_flags: argument name -> a second, short flag.
    """
    hints = get_type_hints(config)
    docs = get_attr_docs(config) if NEEDS_HELP else {}
    description = (config.__doc__ or "").split("\n\n")[0]
    group = parser.add_argument_group(config.__name__, " ".join(description.split()))
    defaults = {f.name: _default(f) for f in dataclasses.fields(args_class)}
    for arg, name in field_of_arg.items():
        kwargs = _flag_kwargs(hints[name])
        if arg == "max_model_len":
            kwargs["type"] = human_readable_int_or_auto
        flags = [f for f in (short_flags.get(arg), "--" + arg.replace("_", "-")) if f]
        help_text = docs.get(name, "").replace("%", "%%")
        made = getattr(config, name, None)
        if defaults[arg] is None and isinstance(made, (int, float)) and made is not False:
            # Left out, the config's default counts, so far as it fits what else was given.
            help_text += f" (default: {made})"
        group.add_argument(*flags, default=defaults[arg], help=help_text, **kwargs)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _flag_kwargs(hint: Any) -> dict[str, Any]:
    """What `add_argument` needs to know of a field of type `hint`."""
    members = _union_members(hint)
    kinds = {get_origin(member) or member for member in members}
    optional = types.NoneType in kinds
    if bool in kinds and str in kinds:
        return {"nargs": "?", "const": True, "metavar": "TOKEN"}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if Literal in kinds and not kinds & {str, Any}:
        return {"choices": _literal_values(members)}
    if list in kinds:
        return {"nargs": "+", "metavar": "NAME"}
    if dict in kinds or any(dataclasses.is_dataclass(kind) for kind in kinds):
        return {"type": _json_object, "metavar": "JSON"}
    for kind, parse in ((int, human_readable_int), (float, _number)):
        if kind in kinds:
            metavar = kind.__name__.upper()
            return {"type": _or_none(parse) if optional else parse, "metavar": metavar}
    return {"type": _or_none(str) if optional else str, "metavar": _literal_metavar(members)}


def _union_members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _literal_values(members: tuple[Any, ...]) -> list[Any]:
    return [value for m in members if get_origin(m) is Literal for value in get_args(m)]


def _literal_metavar(members: tuple[Any, ...]) -> str:
    names = _literal_values(members)
    return "{" + ",".join(names) + "}" if names else "NAME"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else parse(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as {{\"key\": 1}}")
    return value


def first_error(error: ValidationError, flags: Mapping[str, str]) -> str:
    """The first thing that pydantic found wrong, in one line.

    Args:
        flags: field name -> the flag that sets it.
    """
    found = error.errors(include_url=False)[0]
    cause = found.get("ctx", {}).get("error")
    place = found["loc"]
    flag = flags.get(str(place[0]), str(place[0])) if place else ""
    if cause is not None:
        message = " ".join(str(cause).split())
        return message if not flag or _names(message, flag) else f"{flag}: {message}"
    message = found["msg"].removeprefix("Input ")
    inner = "".join(f"[{part!r}]" for part in place[1:])
    return f"{flag}{inner}: {message}, not {found['input']!r}"


def _names(message: str, flag: str) -> bool:
    return flag in message or flag.removeprefix("--").replace("-", "_") in message

# SPDX-License-Identifier: Apache-2.0
"""What every config dataclass shares: validation, refusal of unknown keys, and the seal."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

ConfigType = type
T = TypeVar("T")
_SEALED = "_vllm_sealed"


@overload
def config(cls: type[T]) -> type[T]: ...
@overload
def config(*, config: ConfigDict | None = None) -> Callable[[type[T]], type[T]]: ...


def config(cls=None, *, config: ConfigDict | None = None):
    """Makes a config class: a pydantic dataclass that refuses unknown keys and can be sealed.

    Fields are documented by the string below them (`get_attr_docs`); the command line's help is
    made of these.
    """
    merged = ConfigDict(extra="forbid", validate_default=False)
    merged.update(config or {})

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(cls, config=merged)
        made.__setattr__ = _guarded_setattr  # type: ignore[method-assign]
        return made

    return decorate if cls is None else decorate(cls)


def _guarded_setattr(self: object, name: str, value: object) -> None:
    if self.__dict__.get(_SEALED) and name in type(self).__dataclass_fields__:  # type: ignore[attr-defined]
        raise AttributeError(
            f"{type(self).__name__}.{name} is read-only: the engine has started. Config is changed "
            "in the platform's check_and_update_config or the model's verify_and_update_config"
        )
    object.__setattr__(self, name, value)


def seal(instance: object) -> None:
    """Makes `instance` and every config it holds read-only."""
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            seal(value)
    instance.__dict__[_SEALED] = True


def replace(instance: T, /, **changes: Any) -> T:
    """A copy of `instance` with `changes`, validated again; fields made by the class are remade."""
    fields = dataclasses.fields(instance)  # type: ignore[arg-type]
    values = {f.name: getattr(instance, f.name) for f in fields if f.init}
    return type(instance)(**{**values, **changes})


def update_config(instance: T, overrides: dict[str, Any]) -> T:
    """`replace` for nested overrides: `{"cache_config": {"block_size": 32}}`.

    Raises:
        ValueError: no such field.
    """
    changes = {}
    for name, value in overrides.items():
        if name not in {f.name for f in dataclasses.fields(instance)}:  # type: ignore[arg-type]
            raise ValueError(f"{type(instance).__name__} has no field {name!r}")
        current = getattr(instance, name)
        nested = dataclasses.is_dataclass(current) and isinstance(value, dict)
        changes[name] = update_config(current, value) if nested else value
    return replace(instance, **changes)


def is_init_field(cls: ConfigType, name: str) -> bool:
    """Whether field `name` of `cls` can be given to its constructor."""
    return next(f for f in dataclasses.fields(cls) if f.name == name).init


@cache
def get_attr_docs(cls: ConfigType) -> dict[str, str]:
    """Field name -> the documentation string below it in the source of `cls`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, text in zip(body, body[1:]):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if is_field and is_text and isinstance(text.value.value, str):
            docs[field.target.id] = " ".join(inspect.cleandoc(text.value.value).split())
    return docs


def hash_factors(factors: dict[str, Any]) -> str:
    """A digest of what changes a computation, the same in every process."""
    text = json.dumps(factors, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""Questions about collections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def as_list(maybe_list: Iterable[T]) -> list[T]:
    """`maybe_list` itself if it is a list, else a list of its items."""
    return maybe_list if isinstance(maybe_list, list) else list(maybe_list)


def is_list_of(
    value: object, typ: type[T] | tuple[type[T], ...], *, check: Literal["first", "all"] = "first"
) -> bool:
    """Whether `value` is a list whose first item, or every item, is a `typ`. An empty list is."""
    if not isinstance(value, list):
        return False
    items: Sequence[Any] = value[:1] if check == "first" else value
    return all(isinstance(item, typ) for item in items)

# SPDX-License-Identifier: Apache-2.0
"""Importing by name."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object that a dotted name such as `package.module.Class` stands for.

    Raises:
        ImportError: there is no such module, or it has no such attribute.
    """
    module_name, _, name = qualname.rpartition(".")
    if not module_name:
        raise ImportError(f"{qualname!r} is no dotted name of the form package.module.Name")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no attribute {name!r}") from None


def module_exists(module_name: str) -> bool:
    """Whether `module_name` could be imported, found without importing the module itself.

    Parent packages are imported, as the import system needs their search paths.
    """
    try:
        return importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        return False

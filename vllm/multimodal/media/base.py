# SPDX-License-Identifier: Apache-2.0
"""A decoded medium together with its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class MediaWithBytes(Generic[_T]):
    """What was decoded, and the bytes that it was decoded from (they are quicker to hash)."""

    media: _T
    original_bytes: bytes

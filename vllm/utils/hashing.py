# SPDX-License-Identifier: Apache-2.0
"""Hash functions by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder()


def sha256(value: Any) -> bytes:
    """SHA-256 (32 bytes) over `value` in msgpack, which writes equal values of integers, strings,
    bytes, None and sequences of these in one way only, the same in every process.

    Raises:
        TypeError: `value` holds something else.
    """
    return hashlib.sha256(_encoder.encode(value)).digest()


_HASH_FUNCTIONS: dict[str, Callable[[Any], bytes]] = {"sha256": sha256}


def get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]:
    """The hash function of that name.

    Raises:
        ValueError: it is not supported.
    """
    if hash_fn_name not in _HASH_FUNCTIONS:
        raise ValueError(
            f"prefix_caching_hash_algo {hash_fn_name!r} is not supported; supported: "
            f"{', '.join(_HASH_FUNCTIONS)}"
        )
    return _HASH_FUNCTIONS[hash_fn_name]

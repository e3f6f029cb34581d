# SPDX-License-Identifier: Apache-2.0
"""msgpack for the boundary types, with numpy arrays as (dtype, shape, bytes)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} cannot be sent to another process")


def _dec_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"{kind} cannot be received from another process")


class MsgpackEncoder:
    """Encodes messages of any boundary type."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)

    def encode(self, message: Any) -> bytes:
        """`message` as bytes.

        Raises:
            TypeError: it holds something that is not data.
        """
        return self._encoder.encode(message)


class MsgpackDecoder:
    """Decodes messages of one type, checking them against it."""

    def __init__(self, kind: Any = Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook)

    def decode(self, data: bytes | memoryview) -> Any:
        """The message.

        Raises:
            msgspec.DecodeError: the bytes are no such message.
        """
        return self._decoder.decode(data)

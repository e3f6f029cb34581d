# SPDX-License-Identifier: Apache-2.0
"""Hashes of multimodal items: what an encoder would make the same of, and nothing else, is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.multimodal.media.base import MediaWithBytes

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class MultiModalHasher:
    """SHA-256 over values with their types, shapes and lengths."""

    @classmethod
    def serialize_item(cls, obj: object) -> Iterable[bytes]:
        """The bytes of one value that has no parts.

        Raises:
            TypeError: a kind of value that is not known.
        """
        if isinstance(obj, MediaWithBytes):
            return cls.serialize_item(obj.media)
        if obj is None or isinstance(obj, (bool, int, float, str)):
            return [type(obj).__name__.encode(), str(obj).encode("utf-8", "surrogatepass")]
        if isinstance(obj, (bytes, bytearray, memoryview)):
            return [b"bytes", bytes(obj)]
        if isinstance(obj, (np.ndarray, np.generic)):
            return _serialize_array(np.asarray(obj))
        if _is_tensor(obj):
            return _serialize_tensor(obj)
        if _is_image(obj):
            return _serialize_image(obj)
        raise TypeError(f"a value of type {type(obj).__name__} cannot be hashed")

    @classmethod
    def iter_item_to_bytes(cls, key: str, obj: object) -> Iterable[bytes]:
        """The pieces that a value and its parts are hashed as, each after its length, so that no
        two values have the same ones."""
        if isinstance(obj, Mapping):
            pieces: Iterable[bytes] = [b"map", str(len(obj)).encode()]
            parts = sorted((str(name), part) for name, part in obj.items())
        elif isinstance(obj, (list, tuple)) and (ints := _int64_bytes(obj)):
            pieces, parts = [b"ints", ints], []
        elif isinstance(obj, (list, tuple)):
            pieces = [b"list", str(len(obj)).encode()]
            parts = [(str(i), part) for i, part in enumerate(obj)]
        else:
            pieces, parts = cls.serialize_item(obj), []
        for piece in (key.encode(), *pieces):
            yield len(piece).to_bytes(8, "little")
            yield piece
        for name, part in parts:
            yield from cls.iter_item_to_bytes(name, part)

    @classmethod
    def hash_kwargs(cls, **kwargs: object) -> str:
        """The hash (hexadecimal) of named values, whatever their order.

        Raises:
            TypeError: it holds a kind of value that is not known.
        """
        digest = hashlib.sha256()
        for key in sorted(kwargs):
            for piece in cls.iter_item_to_bytes(key, kwargs[key]):
                digest.update(piece)
        return digest.hexdigest()


def _int64_bytes(values: list | tuple) -> bytes:
    """What they are in 8 bytes each, if they are such numbers (token ids are, by the thousand); b"":
    they are not, or there are none."""
    if set(map(type, values)) != {int}:
        return b""
    try:
        return np.array(values, dtype="<i8").tobytes()
    except OverflowError:
        return b""


def _is_tensor(obj: object) -> bool:
    import torch

    return isinstance(obj, torch.Tensor)


def _is_image(obj: object) -> bool:
    from PIL.Image import Image

    return isinstance(obj, Image)


def _serialize_array(array: np.ndarray) -> list[bytes]:
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be hashed")
    described = f"{array.dtype.str} {array.shape}".encode()
    return [b"array", described, np.ascontiguousarray(array).tobytes()]


def _serialize_tensor(tensor: torch.Tensor) -> list[bytes]:
    import torch

    described = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    flat = tensor.detach().cpu().contiguous().flatten()
    return [b"tensor", described, flat.view(torch.uint8).numpy().tobytes()]


def _serialize_image(image: Image) -> list[bytes]:
    """Pixels alone do not tell: a palette gives them their colours, `transparency` their alpha."""
    palette = image.palette
    return [
        b"image",
        f"{image.mode} {image.size}".encode(),
        image.tobytes(),
        b"" if palette is None else f"{palette.mode}".encode() + bytes(palette.tobytes()),
        repr(image.info.get("transparency")).encode(),
    ]

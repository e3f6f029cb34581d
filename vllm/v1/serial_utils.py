# SPDX-License-Identifier: Apache-2.0
"""msgpack for the boundary types. Arrays and tensors are extension types: (dtype, shape, bytes).

No tensor is made, and torch not imported, unless a message holds one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from vllm.multimodal.fields import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from vllm.multimodal.inputs import MultiModalKwargsItem

_NUMPY_CODE, _TORCH_CODE = 1, 2
_FIELDS: Mapping[str, type[BaseMultiModalField]] = {
    "batched": MultiModalBatchedField,
    "flat": MultiModalFlatField,
    "shared": MultiModalSharedField,
}
_FIELD_NAMES = {kind: name for name, kind in _FIELDS.items()}


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _encode_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, MultiModalKwargsItem):
        return {key: [elem.data, _encode_field(elem.field)] for key, elem in value.items()}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    raise TypeError(f"{type(value)} cannot be sent to another process")


def _dec_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    if kind is MultiModalKwargsItem:
        return MultiModalKwargsItem(
            {
                key: MultiModalFieldElem(data, _decode_field(*field))
                for key, (data, field) in value.items()
            }
        )
    raise TypeError(f"{kind} cannot be received from another process")


def _ext_hook(code: int, data: memoryview) -> Any:
    if code == _NUMPY_CODE:
        dtype, shape, content = _parts(data)
        return np.frombuffer(content, dtype=dtype).reshape(shape)
    if code == _TORCH_CODE:
        return _decode_tensor(*_parts(data))
    raise TypeError(f"extension type {code} is not known")


def _encode_numpy(array: np.ndarray) -> msgspec.msgpack.Ext:
    content = np.ascontiguousarray(array).tobytes()
    return _packed(_NUMPY_CODE, array.dtype.str, array.shape, content)


def _encode_tensor(tensor: Any) -> msgspec.msgpack.Ext:
    import torch

    # numpy has no bfloat16: the bytes are the same under any dtype.
    flat = tensor.detach().cpu().contiguous().flatten()
    content = flat.view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _packed(_TORCH_CODE, dtype, tuple(tensor.shape), content)


def _decode_tensor(dtype: str, shape: list[int], content: memoryview) -> Any:
    import torch

    torch_dtype = getattr(torch, dtype)
    if not len(content):
        return torch.empty(shape, dtype=torch_dtype)
    # A copy of its own: the message is freed, and read-only.
    return torch.frombuffer(bytearray(content), dtype=torch_dtype).reshape(shape)


def _packed(code: int, dtype: str, shape: tuple[int, ...], content: bytes) -> msgspec.msgpack.Ext:
    """A header of known length, then the bytes as they are."""
    header = msgspec.msgpack.encode([dtype, shape])
    return msgspec.msgpack.Ext(code, len(header).to_bytes(4, "little") + header + content)


def _parts(data: memoryview) -> tuple[str, list[int], memoryview]:
    view = memoryview(data)
    end = 4 + int.from_bytes(view[:4], "little")
    dtype, shape = msgspec.msgpack.decode(view[4:end])
    return dtype, shape, view[end:]


def _encode_field(field: BaseMultiModalField) -> list[Any]:
    name = _FIELD_NAMES.get(type(field))
    if name is None:
        raise TypeError(f"{type(field)} cannot be sent to another process")
    if isinstance(field, MultiModalFlatField):
        return [name, field.keep_on_cpu, field.dim, [_encode_cut(cut) for cut in field.slices]]
    extra = [field.batch_size] if isinstance(field, MultiModalSharedField) else []
    return [name, field.keep_on_cpu, *extra]


def _decode_field(name: str, keep_on_cpu: bool, *extra: Any) -> BaseMultiModalField:
    if name == "flat":
        dim, cuts = extra
        return MultiModalFlatField(
            keep_on_cpu=keep_on_cpu, dim=dim, slices=[_decode_cut(cut) for cut in cuts]
        )
    if name == "shared":
        return MultiModalSharedField(keep_on_cpu=keep_on_cpu, batch_size=extra[0])
    return _FIELDS[name](keep_on_cpu=keep_on_cpu)


def _encode_cut(cut: slice | tuple[slice, ...]) -> Any:
    if isinstance(cut, slice):
        return {"slice": [cut.start, cut.stop, cut.step]}
    return [_encode_cut(one) for one in cut]


def _decode_cut(cut: Any) -> slice | tuple[slice, ...]:
    if isinstance(cut, Mapping):
        return slice(*cut["slice"])
    return tuple(_decode_cut(one) for one in cut)


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
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook, ext_hook=_ext_hook)

    def decode(self, data: bytes | memoryview) -> Any:
        """The message.

        Raises:
            msgspec.DecodeError: the bytes are no such message.
        """
        return self._decoder.decode(data)

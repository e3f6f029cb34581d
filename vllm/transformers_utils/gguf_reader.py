# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's header: metadata and tensor table, read from a memory map.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
`gguf.GGUFReader` makes several numpy objects for each string of a vocabulary, which takes 2 s for
50,000 tokens; here arrays are spans that are decoded when asked for, and the header takes
milliseconds. Imports neither torch nor numpy nor gguf.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type id -> struct code of a scalar (the format's own list).
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message names the file and the reason."""


@dataclass(frozen=True)
class GGUFTensorInfo:
    """One entry of the tensor table. `shape` is in torch's order (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int  # from the start of the file

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class _ArraySpan:
    """An array left where it lies: element type, length, and the byte at which its elements
    start."""

    element_type: int
    length: int
    start: int


def is_gguf_file(path: str | Path) -> bool:
    """Whether `path` is a file that starts with GGUF's magic bytes."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class GGUFFile:
    """Header of a GGUF file; tensors stay on disk until `tensor_bytes` maps them.

    Raises GGUFError when the file is not GGUF, is of a version or byte order not supported, or ends
    early.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._data = self._map()
        self._spans: dict[str, _ArraySpan] = {}
        self._values: dict[str, Any] = {}
        try:
            self._parse()
        except (struct.error, IndexError):
            raise self._error("the header ends early; the file is cut short or damaged") from None
        except UnicodeDecodeError:
            raise self._error(
                "the header holds a string that is not UTF-8; the file is damaged"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._values or key in self._spans

    def keys(self) -> list[str]:
        return [*self._values, *self._spans]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: int, float, bool, str, or a list of one of them."""
        if key not in self._values and key in self._spans:
            self._values[key] = self._decode_array(self._spans[key])
        return self._values.get(key, default)

    def array_length(self, key: str) -> int | None:
        """Length of an array, without decoding it; None where `key` is not an array."""
        span = self._spans.get(key)
        return None if span is None else span.length

    @property
    def architecture(self) -> str:
        value = self.get("general.architecture")
        if not isinstance(value, str):
            raise self._error("general.architecture is missing")
        return value

    def tensor_bytes(self, info: GGUFTensorInfo, num_bytes: int) -> memoryview:
        """The bytes of a tensor as a read-only view into the memory map."""
        end = info.offset_bytes + num_bytes
        if end > len(self._data):
            raise self._error(
                f"tensor {info.name} ends at byte {end}, behind the end of the file: it is cut "
                "short"
            )
        return memoryview(self._data)[info.offset_bytes : end]

    def _error(self, reason: str) -> GGUFError:
        return GGUFError(f"{self.path}: {reason}")

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror or error})") from None
        except ValueError:
            raise self._error("the file is empty") from None

    def _parse(self) -> None:
        if self._data[:4] != _MAGIC:
            raise self._error("not a GGUF file (its first bytes are not 'GGUF')")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._data, 4)
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise self._error("a big-endian GGUF file; only little-endian ones are supported")
            raise self._error(
                f"GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}"
            )
        position = 24
        for _ in range(num_values):
            key, position = self._string(position)
            (value_type,) = struct.unpack_from("<I", self._data, position)
            position = self._read_value(key, value_type, position + 4)
        self._read_tensor_table(num_tensors, position)

    def _read_value(self, key: str, value_type: int, position: int) -> int:
        """Note one metadata value; returns the position behind it."""
        if value_type in _SCALARS:
            code = "<" + _SCALARS[value_type]
            (self._values[key],) = struct.unpack_from(code, self._data, position)
            return position + struct.calcsize(code)
        if value_type == _STRING:
            self._values[key], position = self._string(position)
            return position
        if value_type != _ARRAY:
            raise self._error(f"metadata {key} has the unknown value type {value_type}")
        element_type, length = struct.unpack_from("<IQ", self._data, position)
        span = _ArraySpan(element_type, length, position + 12)
        self._spans[key] = span
        return self._end_of_array(key, span)

    def _end_of_array(self, key: str, span: _ArraySpan) -> int:
        if span.element_type in _SCALARS:
            end = span.start + span.length * struct.calcsize("<" + _SCALARS[span.element_type])
        elif span.element_type == _STRING:
            end, read_length = span.start, struct.Struct("<Q").unpack_from
            for _ in range(span.length):
                end += 8 + read_length(self._data, end)[0]
        else:
            raise self._error(
                f"metadata {key} is an array of type {span.element_type}, which is not supported"
            )
        if end > len(self._data):
            raise IndexError(end)
        return end

    def _decode_array(self, span: _ArraySpan) -> list[Any]:
        if span.element_type != _STRING:
            code = f"<{span.length}{_SCALARS[span.element_type]}"
            return list(struct.unpack_from(code, self._data, span.start))
        data, position, read_length = self._data, span.start, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(span.length):
            start = position + 8
            position = start + read_length(data, position)[0]
            strings.append(data[start:position].decode("utf-8"))
        return strings

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, position)
        end = position + 8 + length
        if end > len(self._data):
            raise IndexError(end)
        return self._data[position + 8 : end].decode("utf-8"), end

    def _read_tensor_table(self, num_tensors: int, position: int) -> None:
        entries = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dims,) = struct.unpack_from("<I", self._data, position)
            if num_dims > _MAX_DIMS:
                raise self._error(f"tensor {name} has {num_dims} dimensions; the file is damaged")
            dims = struct.unpack_from(f"<{num_dims}Q", self._data, position + 4)
            position += 4 + 8 * num_dims
            ggml_type, offset = struct.unpack_from("<IQ", self._data, position)
            position += 12
            entries.append((name, tuple(reversed(dims)), ggml_type, offset))
        alignment = self.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._error(
                f"general.alignment is {alignment!r}; it must be a positive number of bytes"
            )
        data_start = -(-position // alignment) * alignment
        self.tensors: dict[str, GGUFTensorInfo] = {}
        for name, shape, ggml_type, offset in entries:
            if name in self.tensors:
                raise self._error(f"tensor {name} is listed twice")
            self.tensors[name] = GGUFTensorInfo(name, shape, ggml_type, data_start + offset)

# SPDX-License-Identifier: Apache-2.0
"""The GGUF header reader: files written by the gguf package, and files that are damaged."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.transformers_utils.gguf_reader import GGUFError, GGUFFile, is_gguf_file

VALUES = {
    "a.u8": (7, "uint8"),
    "a.i64": (-(2**40), "int64"),
    "a.f32": (0.5, "float32"),
    "a.bool": (True, "bool"),
    "a.string": ("grüße\n", "string"),
    "a.ints": ([1, -2, 3], "array"),
    "a.strings": (["x", "", "日本"], "array"),
    "a.floats": ([0.25, -1.0], "array"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A small file with every kind of value and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, (value, kind) in VALUES.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_tensor("t.f32", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("t.f16", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors_come_back(path):
    """Guards against a wrong width, sign or offset: everything written is read as it was."""
    file = GGUFFile(path)
    assert file.architecture == "llama"
    assert {key: file.get(key) for key in VALUES} == {
        key: value for key, (value, _) in VALUES.items()
    }
    assert file.array_length("a.strings") == 3 and file.array_length("a.u8") is None
    assert "a.u8" in file and "a.none" not in file and file.get("a.none", 5) == 5
    assert set(VALUES) <= set(file.keys())
    info = file.tensors["t.f32"]
    assert info.shape == (2, 3) and info.num_elements == 6
    data = np.frombuffer(file.tensor_bytes(info, 24), np.float32)
    assert data.tolist() == [0, 1, 2, 3, 4, 5]
    half = file.tensors["t.f16"]
    assert np.frombuffer(file.tensor_bytes(half, 8), np.float16).tolist() == [0, 1, 2, 3]


def test_cut_files_are_errors(path, tmp_path):
    """A file cut anywhere in its header must be refused by name, never read past its end."""
    whole = path.read_bytes()
    header_bytes = GGUFFile(path).tensors["t.f32"].offset_bytes

    @given(st.integers(0, header_bytes - 33))
    def check(size: int) -> None:
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(GGUFError, match=str(cut)):
            GGUFFile(cut)

    check()


def test_cut_tensor_data_is_an_error(path, tmp_path):
    """The header is whole but the weights are not: the tensor is named."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: GGUFFile(path).tensors["t.f32"].offset_bytes + 8])
    file = GGUFFile(cut)
    with pytest.raises(GGUFError, match=r"t\.f32.*cut short"):
        file.tensor_bytes(file.tensors["t.f32"], 24)


@given(st.binary(max_size=200))
def test_noise_is_an_error(tmp_path_factory, data):
    """Any bytes behind the magic end in GGUFError or a file, not in another exception."""
    path = tmp_path_factory.mktemp("noise") / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    try:
        GGUFFile(path)
    except GGUFError:
        pass


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; supported: 2, 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1s", 1, b"\xff"), "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, data, says):
    """The message names the fault."""
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=says):
        GGUFFile(path)


def test_missing_file(tmp_path):
    """A path that is not there is an error of the same kind; asking whether it is GGUF is not."""
    assert not is_gguf_file(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="cannot be read"):
        GGUFFile(tmp_path / "none.gguf")

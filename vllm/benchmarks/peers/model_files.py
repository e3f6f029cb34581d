# SPDX-License-Identifier: Apache-2.0
"""One model in the formats that peers read; made once, kept in VLLM_CACHE_ROOT/bench."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import vllm.envs as envs

_GGUF_FILE_TYPES = {"F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3}


def cached(model: str, kind: str, make: Callable[[Path], None]) -> Path:
    """`make(path)`'s product for this model, from the cache where it is there."""
    source = Path(model)
    stat = source.stat()
    digest = hashlib.sha256(
        f"{source.resolve()}/{stat.st_size}/{stat.st_mtime_ns}/{kind}".encode()
    ).hexdigest()[:16]
    path = Path(envs.VLLM_CACHE_ROOT) / "bench" / f"{source.stem}-{digest}" / kind
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    make(partial)
    partial.rename(path)
    return path


def hf_folder(model: str, dtype: str) -> Path:
    """The model as a folder in Hugging Face's format; a GGUF file's weights are unpacked."""
    if Path(model).is_dir():
        return Path(model)
    return cached(model, f"hf-{dtype}", lambda path: _save_hf(model, dtype, path))


def _save_hf(model: str, dtype: str, path: Path) -> None:
    from transformers import AutoTokenizer

    from vllm.benchmarks.transformers_peer import load_model

    load_model(model, dtype).save_pretrained(path)
    file = Path(model)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)


def gguf_kind(model: str) -> str:
    """What a GGUF file says that its matrices are: a name such as Q8_0; "" for other kinds."""
    from gguf import GGUFReader

    field = GGUFReader(model).get_field("general.file_type")
    told = None if field is None else field.contents()
    return next((name for name, number in _GGUF_FILE_TYPES.items() if number == told), "")


def gguf_file(model: str, kind: str) -> Path:
    """A GGUF file with its matrices in `kind` (F16, BF16, Q8_0, Q4_0, Q4_1), the rest as it is.

    The file itself where it is of that kind.
    """
    if gguf_kind(model) == kind:
        return Path(model)
    return cached(model, f"{kind}.gguf", lambda path: _write_gguf(model, kind, path))


def _write_gguf(model: str, kind: str, path: Path) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    reader, quantization = GGUFReader(model), GGMLQuantizationType[kind]
    writer = GGUFWriter(path, reader.get_field("general.architecture").contents())
    written_elsewhere = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in written_elsewhere:
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[-1] if is_array else None
        )
    writer.add_file_type(_GGUF_FILE_TYPES[kind])
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            packed = quants.quantize(values, quantization)
            writer.add_tensor(tensor.name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

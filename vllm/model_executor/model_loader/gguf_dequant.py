# SPDX-License-Identifier: Apache-2.0
"""GGUF's blocks to plain weights.

The kinds that small CPU models come in (Q4_0, Q4_1, Q8_0) are worked out here, a few thousand
blocks at a time so that the intermediate float32 values stay in the cache: about six times as fast
as `gguf.quants` and equal to it bit for bit. Every other kind that `gguf.quants` knows goes through
it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm.transformers_utils.gguf_reader import GGUFError, GGUFFile, GGUFTensorInfo

_BLOCKS_AT_A_TIME = 4096
_VALUES_PER_BLOCK = 32

_PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Block formats of `gguf.quants`.
_OTHER_NAMES = (
    "Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 "
    "IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_NL IQ4_XS"
).split()
_OTHER_TYPES = tuple(kind for kind in GGMLQuantizationType if kind.name in _OTHER_NAMES)


def _scales(blocks: np.ndarray, num_scales: int) -> np.ndarray:
    """The float16 scales at the start of each block, as float32 (num_blocks, num_scales)."""
    return np.ascontiguousarray(blocks[:, : 2 * num_scales]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """packed (n, 16) bytes -> out (n, 32): low nibbles are the first half, high ones the second."""
    half = _VALUES_PER_BLOCK // 2
    np.bitwise_and(packed, 15, out=out[:, :half], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, half:], casting="unsafe")


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8.0
    out *= _scales(blocks, 1)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = _scales(blocks, 2)
    _nibbles(blocks[:, 4:], out)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _scales(blocks, 1), out=out)


_BLOCK_KERNELS: dict[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}


def supported_type_names() -> list[str]:
    return sorted(kind.name for kind in (*_PLAIN_TYPES, *_BLOCK_KERNELS, *_OTHER_TYPES))


def quantization_type(file: GGUFFile, info: GGUFTensorInfo) -> GGMLQuantizationType:
    """The tensor's type. Raises GGUFError with the tensor's name where it is not supported."""
    try:
        kind = GGMLQuantizationType(info.ggml_type)
    except ValueError:
        kind = None
    if kind is None or kind not in (*_PLAIN_TYPES, *_BLOCK_KERNELS, *_OTHER_TYPES):
        name = kind.name if kind is not None else f"number {info.ggml_type}"
        raise GGUFError(
            f"{file.path}: tensor {info.name} is of type {name}, which is not supported; "
            f"supported: {', '.join(supported_type_names())}"
        )
    return kind


def raw_rows(file: GGUFFile, info: GGUFTensorInfo) -> np.ndarray:
    """The tensor's bytes as (rows, bytes per row), read-only; a vector is one row."""
    kind = quantization_type(file, info)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block_size:
        raise GGUFError(
            f"{file.path}: tensor {info.name} has shape {info.shape}, but {kind.name} needs "
            "rows of whole "
            f"blocks of {block_size}"
        )
    row_bytes = info.shape[-1] // block_size * block_bytes
    num_rows = info.num_elements // info.shape[-1] if info.num_elements else 0
    data = file.tensor_bytes(info, num_rows * row_bytes)
    return np.frombuffer(data, np.uint8).reshape(num_rows, row_bytes)


def dequantize(
    kind: GGMLQuantizationType, rows: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Weights of `shape` and `dtype` from raw rows (num_rows, row_bytes) of uint8.

    The values are worked out in float32 and rounded once.
    """
    if kind in _PLAIN_TYPES:
        plain = torch.from_numpy(np.array(rows)).view(_PLAIN_TYPES[kind])
        return plain.view(shape).to(dtype)
    if kind not in _BLOCK_KERNELS:
        from gguf.quants import dequantize as gguf_dequantize

        return torch.from_numpy(gguf_dequantize(rows, kind)).view(shape).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    _run_blocks(
        _BLOCK_KERNELS[kind],
        rows.reshape(-1, GGML_QUANT_SIZES[kind][1]),
        out.view(-1, _VALUES_PER_BLOCK),
    )
    return out


def _run_blocks(
    kernel: Callable[[np.ndarray, np.ndarray], None], blocks: np.ndarray, out: torch.Tensor
) -> None:
    """Fill out (num_blocks, 32), a cache's worth of blocks at a time."""
    direct = out.dtype == torch.float32
    scratch = (
        None
        if direct
        else np.empty((min(_BLOCKS_AT_A_TIME, len(blocks)), _VALUES_PER_BLOCK), np.float32)
    )
    for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        chunk = blocks[start : start + _BLOCKS_AT_A_TIME]
        target = out[start : start + len(chunk)]
        values = target.numpy() if direct else scratch[: len(chunk)]
        kernel(chunk, values)
        if not direct:
            target.copy_(torch.from_numpy(values))

# SPDX-License-Identifier: Apache-2.0
"""dtypes by name. Importable without torch: it is imported where a torch dtype is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ITEM_SIZE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "bool": 1,
}  # fmt: skip
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def dtype_name(dtype: str | torch.dtype) -> str:
    """`torch.bfloat16`, `"torch.bfloat16"`, `"bfloat16"` -> `"bfloat16"`; `"half"` -> `"float16"`.

    Raises:
        ValueError: no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _ITEM_SIZE_BYTES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(_ITEM_SIZE_BYTES)}")
    return name


def get_dtype_size(dtype: str | torch.dtype) -> int:
    """Bytes of one element."""
    return _ITEM_SIZE_BYTES[dtype_name(dtype)]


def kv_cache_dtype_name(kv_cache_dtype: str, model_dtype: str | torch.dtype) -> str:
    """The dtype of a cache's elements by name, for a `--kv-cache-dtype`."""
    if kv_cache_dtype == "auto":
        return dtype_name(model_dtype)
    if kv_cache_dtype.startswith("fp8"):
        return "float8_e4m3fn"
    return "int8" if kv_cache_dtype == "int8_per_token_head" else dtype_name(kv_cache_dtype)


def str_dtype_to_torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of that name."""
    import torch

    return getattr(torch, dtype_name(dtype))

# SPDX-License-Identifier: Apache-2.0
"""Small operations of a CPU forward pass in compiled Python; sums are float32.

    init_threads(num_threads)       once when a worker starts: torch and kernels share one pool
    warmup(dtype)                   compiles all kernels of a dtype, or loads them from disk
    missing(dtype)                  those that are not on disk yet, for `compile_beside`
    rms_norm(x, weight, eps, out=None)
    fused_add_rms_norm(x, residual, weight, eps, out=None)
                                    residual += x in place; returns the norm of the sum
    gemma_rms_norm(x, weight, eps, residual=None)
    layer_norm(x, weight, bias, eps, residual=None, out=None)
    silu_and_mul, gelu_and_mul, gelu_tanh_and_mul (x, out=None)
                                    (..., 2 N) -> (..., N)
    gelu, gelu_tanh (x)             (..., N) -> (..., N)
    add_table_rows(x, indices, table, offset=0)
                                    x (T, N) plus rows of a table, by int64 indices
    rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox=True)
                                    in place; key may be None
    rotary_and_cache(positions, query, key, value, head_size, cos_sin_cache,
                     key_cache, value_cache, slot_mapping, is_neox=True)
                                    query in place, turned keys and values to their slots
    gemv(x, weight, bias=None, out=None), linear(x, weight, bias=None)
    can_pack(weight), pack(weight)  a weight in the form that `linear` multiplies fastest
    embedding(ids, table)           rows of a table, packed or not
    argmax(x)                       the place of each row's maximum, and whether that is -inf

Tensors are float32, bfloat16 or float16, all of a call the same; positions, slot_mapping: int64;
cos_sin_cache: float32 (max_position, rotary_dim); caches: views (NB, BS, H, D). `out` may be x.
One thread at a time may call these: their argument records are shared.
"""

from __future__ import annotations

import torch

from . import program
from .argmax import argmax
from .elementwise import add_table_rows
from .kernel_library import Compilation
from .linear import gemv, linear
from .ops import (
    LIBRARY,
    fused_add_rms_norm,
    gemma_rms_norm,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    layer_norm,
    rms_norm,
    rotary_and_cache,
    rotary_embedding,
    silu_and_mul,
)
from .packing import can_pack, embedding, is_packed, pack, unpack
from .threads import init_threads, num_threads


def missing(dtype: str) -> list[Compilation | None]:
    """What the first `warmup` and the first program would have to compile."""
    return [LIBRARY.missing(dtype), program.LIBRARY.missing("float32")]


def warmup(dtype: torch.dtype) -> None:
    """Makes the kernels of a dtype ready: compiles them on the first start, else maps them from
    the cache on disk.
    """
    LIBRARY.load(str(dtype).removeprefix("torch."))


__all__ = [
    "add_table_rows",
    "argmax",
    "can_pack",
    "embedding",
    "fused_add_rms_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gemma_rms_norm",
    "gemv",
    "init_threads",
    "is_packed",
    "layer_norm",
    "linear",
    "missing",
    "num_threads",
    "pack",
    "rms_norm",
    "rotary_and_cache",
    "rotary_embedding",
    "silu_and_mul",
    "unpack",
    "warmup",
]

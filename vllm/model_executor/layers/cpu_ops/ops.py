# SPDX-License-Identifier: Apache-2.0
"""Norms, gated activations and rotary embedding on torch tensors: checks, strides, launch."""

from __future__ import annotations

import torch

from . import op_args
from .kernel_library import KernelLibrary, KernelTable
from .threads import Arguments, launch, num_threads, recording

LIBRARY = KernelLibrary("vllm.model_executor.layers.cpu_ops.ops_kernels")
_BYTES_WORTH_A_THREAD = 1 << 17

_norm_args = Arguments(op_args.NORM_FORMAT)
_gate_args = Arguments(op_args.GATE_FORMAT)
_rotary_args = Arguments(op_args.ROTARY_FORMAT)
_RMS_NORM, _LAYER_NORM = KernelTable(LIBRARY, "rms_norm"), KernelTable(LIBRARY, "layer_norm")
_GEMMA_RMS_NORM = KernelTable(LIBRARY, "gemma_rms_norm")
_SILU, _GELU = KernelTable(LIBRARY, "silu_and_mul"), KernelTable(LIBRARY, "gelu_and_mul")
_GELU_ALONE, _GELU_TANH_ALONE = KernelTable(LIBRARY, "gelu"), KernelTable(LIBRARY, "gelu_tanh")
_GELU_TANH, _ROTARY = KernelTable(LIBRARY, "gelu_tanh_and_mul"), KernelTable(LIBRARY, "rotary")


def share(rows: int, nbytes: int) -> tuple[int, int]:
    """(threads, rows taken at a time) for work that touches so many bytes: little work isn't
    worth waking a thread. A program's threads are awake.
    """
    if recording() is not None:
        return num_threads(), 1
    if nbytes < _BYTES_WORTH_A_THREAD:
        return 1, rows
    threads = min(num_threads(), 1 + nbytes // _BYTES_WORTH_A_THREAD)
    return threads, max(1, rows // (4 * threads))


def _row_stride(x: torch.Tensor) -> int:
    """Values from a row to the next in a tensor (..., N) whose leading dimensions fold into one."""
    strides = x.stride()
    if len(strides) == 2 and strides[1] == 1:
        return strides[0]
    if not strides or strides[-1] != 1 or (len(strides) > 2 and not x.is_contiguous()):
        raise ValueError(
            "rows must have an innermost stride of 1 and fold into one dimension, "
            f"got strides {strides}"
        )
    return x.shape[-1]


def _norm(
    table: KernelTable,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty_like(x) if out is None else out
    dtype, shape, size = x.dtype, x.shape, weight.shape[0]
    kernel, itemsize = table[dtype]
    same = weight.dtype is dtype and out.dtype is dtype and (bias is None or bias.dtype is dtype)
    if not same or shape[-1] != size or out.shape != shape:
        raise ValueError(
            f"{table.name}: x {tuple(shape)} {dtype} does not fit weight "
            f"{tuple(weight.shape)} {weight.dtype} or out"
        )
    added, added_row = 0, 0
    if residual is not None:
        if residual.shape != shape or residual.dtype is not dtype:
            raise ValueError(
                f"{table.name}: residual {tuple(residual.shape)} {residual.dtype} differs from x"
            )
        added, added_row = residual.data_ptr(), _row_stride(residual) * itemsize
    rows = x.numel() // size
    threads, step = share(rows, rows * size * 4 * itemsize)
    _norm_args.write(
        0,
        step,
        rows,
        x.data_ptr(),
        _row_stride(x) * itemsize,
        added,
        added_row,
        out.data_ptr(),
        _row_stride(out) * itemsize,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        size,
        eps,
    )
    launch(kernel, _norm_args.address, threads)
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., N) / rms(x) * weight (N), rounded before the weight as Llama does it. `out` may be
    x.
    """
    return _norm(_RMS_NORM, x, weight, None, eps, None, out)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x (in place, rounded); returns rms_norm(residual). `out` may be x."""
    return _norm(_RMS_NORM, x, weight, None, eps, residual, out)


def gemma_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., N) / rms(x) * (1 + weight), rounded once; with a residual, residual += x first (in
    place) and the sum is normed."""
    return _norm(_GEMMA_RMS_NORM, x, weight, None, eps, residual, None)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layer norm of x (..., N); with a residual, residual += x first (in place) and the sum is
    normed.
    """
    return _norm(_LAYER_NORM, x, weight, bias, eps, residual, out)


def _gate(table: KernelTable, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    shape, dtype = x.shape, x.dtype
    size = shape[-1] // 2
    kernel, itemsize = table[dtype]
    if out is None:
        out = x.new_empty((shape[0], size) if len(shape) == 2 else (*shape[:-1], size))
    elif out.dtype is not dtype or out.shape != (*shape[:-1], size):
        raise ValueError(
            f"{table.name}: out {tuple(out.shape)} {out.dtype} does not fit "
            f"x {tuple(shape)} {dtype}"
        )
    if shape[-1] != 2 * size:
        raise ValueError(f"{table.name}: x {tuple(shape)} must hold gate and up, equally long")
    rows = x.numel() // (2 * size)
    threads, step = share(rows, rows * size * 4 * itemsize)
    x_row, out_row = _row_stride(x) * itemsize, _row_stride(out) * itemsize
    _gate_args.write(0, step, rows, x.data_ptr(), x_row, out.data_ptr(), out_row, size)
    launch(kernel, _gate_args.address, threads)
    return out


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> silu(x[..., :N]) * x[..., N:], rounded once."""
    return _gate(_SILU, x, out)


def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> gelu(x[..., :N]) * x[..., N:], the exact gelu."""
    return _gate(_GELU, x, out)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> gelu(x[..., :N]) * x[..., N:], gelu by its tanh approximation."""
    return _gate(_GELU_TANH, x, out)


def _activate(table: KernelTable, x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    kernel, itemsize = table[x.dtype]
    out = x.new_empty(x.shape)
    rows = x.numel() // size if size else 0
    threads, step = share(rows, rows * size * 4 * itemsize)
    x_row, out_row = _row_stride(x) * itemsize, size * itemsize
    _gate_args.write(0, step, rows, x.data_ptr(), x_row, out.data_ptr(), out_row, size)
    launch(kernel, _gate_args.address, threads)
    return out


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact gelu of x (..., N), rounded once."""
    return _activate(_GELU_ALONE, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """gelu of x (..., N) by its tanh approximation, rounded once."""
    return _activate(_GELU_TANH_ALONE, x)


def _heads(x: torch.Tensor, head_size: int, itemsize: int) -> tuple[int, int, int, int]:
    """(address, row stride, head stride, heads), strides in bytes, of (T, H * D) or (T, H, D)."""
    shape, strides = x.shape, x.stride()
    if strides[-1] == 1:
        if len(shape) == 3 and shape[2] == head_size:
            return x.data_ptr(), strides[0] * itemsize, strides[1] * itemsize, shape[1]
        if len(shape) == 2 and not shape[1] % head_size:
            return x.data_ptr(), strides[0] * itemsize, head_size * itemsize, shape[1] // head_size
    raise ValueError(
        f"shape {tuple(shape)} with strides {strides} does not hold heads of {head_size}"
    )


_NO_CACHE = (0,) * 14


def _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, value_and_cache) -> None:
    num_tokens, dtype = query.shape[0], query.dtype
    kernel, itemsize = _ROTARY[dtype]
    table_rows, rotary_dim = cos_sin_cache.shape
    table_row, table_step = cos_sin_cache.stride()
    if (
        positions.dtype is not torch.int64
        or positions.numel() != num_tokens
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions must be contiguous int64 for {num_tokens} tokens, got {positions.dtype}"
        )
    if (
        cos_sin_cache.dtype is not torch.float32
        or table_step != 1
        or not 0 < rotary_dim <= head_size
    ):
        raise ValueError(
            f"cos_sin_cache must be float32 (positions, rotary_dim <= {head_size}), "
            "cosines then sines"
        )
    if key is not None and key.dtype is not dtype:
        raise ValueError(f"query {dtype} and key {key.dtype} must be the same dtype")
    queries = _heads(query, head_size, itemsize)
    keys = (0, 0, 0, 0) if key is None else _heads(key, head_size, itemsize)
    threads, step = share(
        num_tokens, num_tokens * (queries[3] + keys[3]) * head_size * 2 * itemsize
    )
    _rotary_args.write(
        0,
        step,
        num_tokens,
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        4 * table_row,
        rotary_dim,
        head_size,
        1 if is_neox else 0,
        *queries,
        *keys,
        *value_and_cache,
    )
    launch(kernel, _rotary_args.address, threads)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Turns query and key (T, H * D) or (T, H, D), views of a fused buffer too, in place by
    positions int64 (T,).

    cos_sin_cache: float32 (max_position, rotary_dim), cosines then sines; dimensions beyond
    rotary_dim stay. is_neox: pairs are (i, i + rotary_dim / 2), else (2 i, 2 i + 1).
    """
    _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, _NO_CACHE)


def rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """rotary_embedding and reshape_and_cache in one pass: query turned in place, turned keys and
    values to their slots.

    key and value are left as they were (attention reads the cache); key_cache, value_cache: views
    (NB, BS, H, D).
    """
    dtype, slots = query.dtype, slot_mapping
    itemsize = dtype.itemsize
    if not (value.dtype is dtype and key_cache.dtype is dtype and value_cache.dtype is dtype):
        raise ValueError(
            f"query {dtype}, value {value.dtype} and caches {key_cache.dtype} "
            "must be the same dtype"
        )
    if (
        slots.dtype is not torch.int64
        or slots.numel() < query.shape[0]
        or not slots.is_contiguous()
    ):
        raise ValueError(
            f"slot_mapping must be contiguous int64 for {query.shape[0]} tokens, got {slots.dtype}"
        )
    _, tokens_per_block, heads, key_size = key_cache.shape
    value_size = value_cache.shape[3]
    v, v_row, v_head, v_heads = _heads(value, value_size, itemsize)
    if v_heads != heads or key_size != head_size or key.numel() != key.shape[0] * heads * head_size:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} "
            f"do not fit {tuple(key_cache.shape)}"
        )
    kb, kt, kh, k_last = key_cache.stride()
    vb, vt, vh, v_last = value_cache.stride()
    if k_last != 1 or v_last != 1:
        raise ValueError("head_size must be the caches' innermost dimension, with stride 1")
    tail = (
        v,
        v_row,
        v_head,
        value_size * itemsize,
        slots.data_ptr(),
        tokens_per_block,
        key_cache.data_ptr(),
        kb * itemsize,
        kt * itemsize,
        kh * itemsize,
        value_cache.data_ptr(),
        vb * itemsize,
        vt * itemsize,
        vh * itemsize,
    )
    _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, tail)

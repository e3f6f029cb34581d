# SPDX-License-Identifier: Apache-2.0
"""Norms, gated activations and rotary embedding on torch tensors: checks, strides, launch."""

from __future__ import annotations

import torch

from . import op_args
from .kernel_library import KernelLibrary
from .threads import Arguments, launch, num_threads

LIBRARY = KernelLibrary("vllm.model_executor.layers.cpu_ops.ops_kernels")
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_BYTES_WORTH_A_THREAD = 1 << 17

_norm_args = Arguments(op_args.NORM_FORMAT)
_gate_args = Arguments(op_args.GATE_FORMAT)
_rotary_args = Arguments(op_args.ROTARY_FORMAT)


def kernels(dtype: torch.dtype):
    """The compiled kernels for a dtype; ValueError for one they don't exist for."""
    return LIBRARY.load(DTYPE_NAMES.get(dtype, str(dtype)))


def share(rows: int, nbytes: int) -> tuple[int, int]:
    """(threads, rows taken at a time) for work that touches so many bytes: little work isn't worth waking a thread."""
    threads = min(num_threads(), 1 + nbytes // _BYTES_WORTH_A_THREAD)
    return (1, rows) if threads == 1 else (threads, max(1, rows // (4 * threads)))


def _rows(x: torch.Tensor, what: str) -> tuple[int, int]:
    """(rows, bytes from a row to the next) of a tensor (..., N) whose leading dimensions fold into one."""
    if x.stride(-1) != 1 or (x.dim() > 2 and not x.is_contiguous()):
        raise ValueError(f"{what} must have an innermost stride of 1 and foldable rows, got strides {x.stride()}")
    size = x.shape[-1]
    rows = x.numel() // size
    return rows, (x.stride(-2) if x.dim() > 1 else size) * x.element_size()


def _norm(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    rows, x_row = _rows(x, "x")
    same = weight.dtype == x.dtype == out.dtype and (bias is None or bias.dtype == x.dtype)
    if not same or weight.numel() != x.shape[-1] or out.shape != x.shape:
        raise ValueError(f"{name}: x {tuple(x.shape)} {x.dtype} does not fit weight {weight.shape} {weight.dtype} or out")
    residual_row = 0
    if residual is not None:
        _, residual_row = _rows(residual, "residual")
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"{name}: residual {tuple(residual.shape)} {residual.dtype} differs from x")
    threads, step = share(rows, x.numel() * 4 * x.element_size())
    address = _norm_args.set(
        *(0, step, rows, x.data_ptr(), x_row, residual.data_ptr() if residual is not None else 0, residual_row),
        *(out.data_ptr(), _rows(out, "out")[1], weight.data_ptr(), bias.data_ptr() if bias is not None else 0),
        *(x.shape[-1], eps),
    )
    launch(kernels(x.dtype)[name], address, threads)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., N) / rms(x) * weight (N), rounded before the weight as Llama does it. `out` may be x."""
    return _norm("rms_norm", x, weight, None, eps, None, out)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """residual += x (in place, rounded to its dtype); returns rms_norm(residual). `out` may be x."""
    return _norm("rms_norm", x, weight, None, eps, residual, out)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layer norm of x (..., N); with a residual, residual += x first (in place) and the sum is normed."""
    return _norm("layer_norm", x, weight, bias, eps, residual, out)


def _gate(name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype) if out is None else out
    rows, x_row = _rows(x, "x")
    if x.shape[-1] % 2 or out.shape != (*x.shape[:-1], size) or out.dtype != x.dtype:
        raise ValueError(f"{name}: x {tuple(x.shape)} {x.dtype} must hold gate and up; out {tuple(out.shape)} {out.dtype}")
    threads, step = share(rows, x.numel() * 2 * x.element_size())
    address = _gate_args.set(0, step, rows, x.data_ptr(), x_row, out.data_ptr(), _rows(out, "out")[1], size)
    launch(kernels(x.dtype)[name], address, threads)
    return out


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> silu(x[..., :N]) * x[..., N:], rounded once."""
    return _gate("silu_and_mul", x, out)


def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> gelu(x[..., :N]) * x[..., N:], the exact gelu."""
    return _gate("gelu_and_mul", x, out)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., 2 N) -> gelu(x[..., :N]) * x[..., N:], gelu by its tanh approximation."""
    return _gate("gelu_tanh_and_mul", x, out)


def _heads(x: torch.Tensor, head_size: int, what: str) -> tuple[int, int, int, int]:
    """(address, row stride, head stride, heads), strides in bytes, of (T, H * D) or (T, H, D)."""
    itemsize = x.element_size()
    if x.stride(-1) != 1 or x.shape[-1] % head_size or (x.dim() == 3 and x.shape[2] != head_size):
        raise ValueError(f"{what} {tuple(x.shape)} {x.stride()} does not hold heads of {head_size}")
    if x.dim() == 3:
        return x.data_ptr(), x.stride(0) * itemsize, x.stride(1) * itemsize, x.shape[1]
    return x.data_ptr(), x.stride(0) * itemsize, head_size * itemsize, x.shape[1] // head_size


def _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, value_and_cache) -> None:
    num_tokens, rotary_dim = query.shape[0], cos_sin_cache.shape[1]
    if positions.dtype != torch.int64 or not positions.is_contiguous() or positions.numel() != num_tokens:
        raise ValueError(f"positions must be contiguous int64 for {num_tokens} tokens, got {positions.dtype}")
    if cos_sin_cache.dtype != torch.float32 or cos_sin_cache.stride(1) != 1 or not 0 < rotary_dim <= head_size:
        raise ValueError(f"cos_sin_cache must be float32 (positions, rotary_dim <= {head_size}), cosines then sines")
    key_heads = (0, 0, 0, 0) if key is None else _heads(key, head_size, "key")
    if key is not None and key.dtype != query.dtype:
        raise ValueError(f"query {query.dtype} and key {key.dtype} must be the same dtype")
    threads, step = share(num_tokens, num_tokens * query[0].numel() * 2 * query.element_size() if num_tokens else 0)
    address = _rotary_args.set(
        *(0, step, num_tokens, positions.data_ptr(), cos_sin_cache.data_ptr(), 4 * cos_sin_cache.stride(0)),
        *(rotary_dim, head_size, int(is_neox)),
        *_heads(query, head_size, "query"),
        *key_heads,
        *value_and_cache,
    )
    launch(kernels(query.dtype)["rotary"], address, threads)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Turns query and key (T, H * D) or (T, H, D), views of a fused buffer too, in place by positions int64 (T,).

    cos_sin_cache: float32 (max_position, rotary_dim), cosines then sines; dimensions beyond rotary_dim stay.
    is_neox: pairs are (i, i + rotary_dim / 2), else (2 i, 2 i + 1).
    """
    _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, (0,) * 14)


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
    """rotary_embedding and reshape_and_cache in one pass: query turned in place, turned keys and values to their slots.

    key and value are left as they were (attention reads the cache); key_cache, value_cache: views (NB, BS, H, D).
    """
    itemsize = query.element_size()
    if not query.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"query {query.dtype}, value {value.dtype} and caches {key_cache.dtype} must be the same dtype")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous() or slot_mapping.numel() < query.shape[0]:
        raise ValueError(f"slot_mapping must be contiguous int64 for {query.shape[0]} tokens, got {slot_mapping.dtype}")
    heads, value_size = key_cache.shape[2], value_cache.shape[3]
    if key[0].numel() != heads * head_size or value[0].numel() != heads * value_size or key_cache.shape[3] != head_size:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit {tuple(key_cache.shape)}")
    kb, kt, kh, k_last = key_cache.stride()
    vb, vt, vh, v_last = value_cache.stride()
    if k_last != 1 or v_last != 1:
        raise ValueError("head_size must be the caches' innermost dimension, with stride 1")
    v, v_row, v_head, _ = _heads(value, value_size, "value")
    tail = (
        *(v, v_row, v_head, value_size * itemsize, slot_mapping.data_ptr(), key_cache.shape[1]),
        *(key_cache.data_ptr(), kb * itemsize, kt * itemsize, kh * itemsize),
        *(value_cache.data_ptr(), vb * itemsize, vt * itemsize, vh * itemsize),
    )
    _rotary(positions, query, key, head_size, cos_sin_cache, is_neox, tail)

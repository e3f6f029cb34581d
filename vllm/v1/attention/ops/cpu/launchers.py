# SPDX-License-Identifier: Apache-2.0
"""Attention and cache writes on torch tensors: checks, strides, launch. See the package's docstring for the contract."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.cpu_ops.kernel_library import KernelLibrary
from vllm.model_executor.layers.cpu_ops.threads import Arguments, Scratch, launch, num_threads

from . import attend_args, cache_args

LIBRARY = KernelLibrary("vllm.v1.attention.ops.cpu.attention_kernels")
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_BYTES_WORTH_A_THREAD = 1 << 16

_attend_args = Arguments(attend_args.FORMAT)
_cache_args = Arguments(cache_args.FORMAT)
_plan_scratch, _thread_scratch, _partial_scratch = Scratch(), Scratch(), Scratch()


def kernels(dtype: torch.dtype):
    """The compiled kernels for a dtype; ValueError for one they don't exist for."""
    return LIBRARY.load(DTYPE_NAMES.get(dtype, str(dtype)))


def key_value_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views (NB, BS, H, D) of a fused cache with logical shape (NB, H, BS, 2 * D), any strides."""
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k, v


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copies key and value (T, H, D) into the slots (block * BS + offset) of caches (NB, BS, H, D).

    slot_mapping: int64 (T,), negative: not written. Tensors may be strided; the last stride must be 1, dtypes equal.
    """
    num_tokens, num_heads, head_size = key.shape
    itemsize = key.element_size()
    _check_writable(key, key_cache)
    _check_writable(value, value_cache)
    if slot_mapping.dtype != torch.int64 or slot_mapping.numel() < num_tokens or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 for {num_tokens} tokens, got {slot_mapping.dtype}")
    threads = min(num_threads(), 1 + key.numel() * itemsize * 2 // _BYTES_WORTH_A_THREAD)
    kt, kh, _ = key.stride()
    vt, vh, _ = value.stride()
    kb, ks, khc, _ = key_cache.stride()
    vb, vs, vhc, _ = value_cache.stride()
    address = _cache_args.set(
        *(0, max(1, num_tokens // (4 * threads)), num_tokens, slot_mapping.data_ptr()),
        *(key.data_ptr(), kt * itemsize, kh * itemsize),
        *(key_cache.data_ptr(), kb * itemsize, ks * itemsize, khc * itemsize, head_size * itemsize),
        *(value.data_ptr(), vt * itemsize, vh * itemsize),
        *(value_cache.data_ptr(), vb * itemsize, vs * itemsize, vhc * itemsize, value.shape[2] * itemsize),
        *(key_cache.shape[1], num_heads),
    )
    launch(kernels(key.dtype)["cache"], address, threads)


def _check_writable(new: torch.Tensor, cache: torch.Tensor) -> None:
    if new.dtype != cache.dtype:
        raise ValueError(f"cannot write {new.dtype} into a cache of {cache.dtype}: dtypes must be equal")
    if new.stride(2) != 1 or cache.stride(3) != 1:
        raise ValueError("head_size must be the innermost dimension, with stride 1")
    if new.shape[1:] != cache.shape[2:]:
        raise ValueError(f"heads and head size of {tuple(new.shape)} and cache {tuple(cache.shape)} differ")


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    causal: bool = True,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of a ragged batch over paged keys and values; see the package's docstring. Writes `out`."""
    num_heads, head_size = query.shape[1:]
    _, tokens_per_block, num_kv_heads, _ = key_cache.shape
    num_requests = seq_lens.shape[0]
    itemsize = query.element_size()
    _check_attention(query, key_cache, value_cache, out, causal, sliding_window)
    _check_metadata(query_start_loc, seq_lens, block_table)
    qt, qh, _ = query.stride()
    kb, kt, kh, _ = key_cache.stride()
    vb, vt, vh, _ = value_cache.stride()
    ot, oh, _ = out.stride()
    prefix = _plan_scratch.reserve(8 * (2 * num_requests + 2 + num_requests * num_kv_heads))
    words = [
        *(query.data_ptr(), qt * itemsize, qh * itemsize),
        *(key_cache.data_ptr(), kb * itemsize, kt * itemsize, kh * itemsize),
        *(value_cache.data_ptr(), vb * itemsize, vt * itemsize, vh * itemsize),
        *(out.data_ptr(), ot * itemsize, oh * itemsize),
        *(query_start_loc.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), 4 * block_table.stride(0)),
        *(num_requests, num_kv_heads, num_heads // num_kv_heads, head_size, tokens_per_block),
        *(int(causal), sliding_window, _floats(alibi_slopes, num_heads), _floats(sinks, num_heads), prefix),
    ]
    loaded = kernels(query.dtype)
    address = _attend_args.set(0, 0, 0, 0, 0, *words, 0, 0, scale, logits_soft_cap)
    loaded["plan"].run(address)
    items, partial_bytes, thread_bytes = (_attend_args.read(i) for i in (2, 3, 4))
    if not items:
        return
    threads = min(num_threads(), items)
    scratch, partial = _thread_scratch.reserve(threads * thread_bytes), _partial_scratch.reserve(partial_bytes)
    _attend_args.set(0, 0, items, partial_bytes, thread_bytes, *words, scratch, partial, scale, logits_soft_cap)
    launch(loaded["attend"], address, threads)


def _floats(values: torch.Tensor | None, count: int) -> int:
    if values is None:
        return 0
    if values.dtype != torch.float32 or values.numel() != count or not values.is_contiguous():
        raise ValueError(f"alibi slopes and sinks must be contiguous float32, one for each of {count} query heads")
    return values.data_ptr()


def _check_attention(query, key_cache, value_cache, out, causal: bool, sliding_window: int) -> None:
    if not query.dtype == key_cache.dtype == value_cache.dtype == out.dtype:
        raise ValueError(
            f"query {query.dtype}, cache {key_cache.dtype}/{value_cache.dtype} and out {out.dtype} must be the same dtype"
        )
    if query.stride(2) != 1 or out.stride(2) != 1 or key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("head_size must be the innermost dimension, with stride 1")
    head_size, num_kv_heads = query.shape[2], key_cache.shape[2]
    if head_size % 2 or key_cache.shape[3] != head_size or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"head size must be even and the same in query {tuple(query.shape)}, key cache {tuple(key_cache.shape)} "
            f"and value cache {tuple(value_cache.shape)}"
        )
    if query.shape[1] % num_kv_heads or out.shape != query.shape:
        raise ValueError(f"{query.shape[1]} query heads over {num_kv_heads} KV heads, out {tuple(out.shape)}")
    if sliding_window < 0 or (sliding_window and not causal):
        raise ValueError(f"sliding_window={sliding_window} needs causal attention and a window of at least 0")


def _check_metadata(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor) -> None:
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens), ("block_table", block_table)):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 with an innermost stride of 1, got {tensor.dtype}")
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1 or block_table.shape[0] < seq_lens.shape[0]:
        raise ValueError(
            f"{seq_lens.shape[0]} requests need {seq_lens.shape[0] + 1} query starts (got {query_start_loc.shape[0]}) "
            f"and as many block table rows (got {block_table.shape[0]})"
        )

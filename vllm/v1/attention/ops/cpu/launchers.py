# SPDX-License-Identifier: Apache-2.0
"""Attention and cache writes on torch tensors: checks, strides, launch. See the package's
docstring for the contract.
"""

from __future__ import annotations

import torch

from vllm.model_executor.layers.cpu_ops.kernel_library import KernelLibrary, KernelTable
from vllm.model_executor.layers.cpu_ops.target import host_target
from vllm.model_executor.layers.cpu_ops.threads import (
    Arguments,
    Counts,
    Scratch,
    launch,
    num_threads,
    recording,
)

from . import attend_args, cache_args
from .tile_sizes import CHUNK, SHARES, SPLIT_ROWS

LIBRARY = KernelLibrary("vllm.v1.attention.ops.cpu.attention_kernels")
_PLAN, _ATTEND = KernelTable(LIBRARY, "plan"), KernelTable(LIBRARY, "attend")
_CACHE = KernelTable(LIBRARY, "cache")
_BYTES_WORTH_A_THREAD = 1 << 17
_MANY_ITEMS = 32  # some 10 microseconds each
# With so many, 64 streams of Llama-3.1-8B are split up to 50 thousand keys each. What isn't used takes
# no memory.
_MOST_PARTIAL_BYTES = 256 << 20

_attend_args = Arguments(
    attend_args.FORMAT, Counts(rows=None, requests=attend_args.NUM_REQUESTS)
)
_size_args = Arguments(attend_args.FORMAT)
_cache_args = Arguments(cache_args.FORMAT)
_plan_scratch, _thread_scratch, _partial_scratch = Scratch(), Scratch(), Scratch()
_nothing_scratch = Scratch()  # of its own: a recorded plan holds the address of the other's memory


def key_value_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views (NB, BS, H, D) of a fused cache with logical shape (NB, H, BS, 2 * D), any
    strides.
    """
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k, v


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copies key and value (T, H, D) into the slots (block * BS + offset) of caches (NB, BS, H,
    D).

    slot_mapping: int64 (T,), negative: not written. Tensors may be strided; the last stride must
    be 1, dtypes equal.
    """
    num_tokens, num_heads, head_size = key.shape
    dtype, slots = key.dtype, slot_mapping
    kernel, size = _CACHE[dtype]
    if not (value.dtype is dtype and key_cache.dtype is dtype and value_cache.dtype is dtype):
        raise ValueError(
            f"key {dtype}, value {value.dtype} and caches {key_cache.dtype} must be the same dtype"
        )
    if slots.dtype is not torch.int64 or slots.numel() < num_tokens or not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping must be contiguous int64 for {num_tokens} tokens, got {slots.dtype}"
        )
    if key_cache.shape[2:] != (num_heads, head_size) or value_cache.shape[2:] != value.shape[1:]:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} "
            f"do not fit {tuple(key_cache.shape)}"
        )
    (kt, kh, k1), (vt, vh, v1) = key.stride(), value.stride()
    (kb, ks, kch, kc1), (vb, vs, vch, vc1) = key_cache.stride(), value_cache.stride()
    if not k1 == v1 == kc1 == vc1 == 1:
        raise ValueError("head_size must be the innermost dimension, with stride 1")
    threads = min(
        num_threads(), 1 + num_tokens * num_heads * head_size * size * 2 // _BYTES_WORTH_A_THREAD
    )
    _cache_args.write(
        0,
        max(1, num_tokens // (4 * threads)),
        num_tokens,
        slots.data_ptr(),
        key.data_ptr(),
        kt * size,
        kh * size,
        key_cache.data_ptr(),
        kb * size,
        ks * size,
        kch * size,
        head_size * size,
        value.data_ptr(),
        vt * size,
        vh * size,
        value_cache.data_ptr(),
        vb * size,
        vs * size,
        vch * size,
        value.shape[2] * size,
        key_cache.shape[1],
        num_heads,
    )
    launch(kernel, _cache_args.address, threads)


def _attention_words(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    causal: bool,
    sliding_window: int,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[int, ...]:
    """Where the tensors of `paged_attention` lie and how they are walked, as the kernel reads it."""
    (_, num_heads, head_size), (_, tokens_per_block, num_kv_heads, _) = (
        query.shape,
        key_cache.shape,
    )
    num_requests, size = seq_lens.shape[0], query.element_size()
    (qt, qh, q1), (ot, oh, o1) = query.stride(), out.stride()
    (kb, kt, kh, k1), (vb, vt, vh, v1) = key_cache.stride(), value_cache.stride()
    if not q1 == o1 == k1 == v1 == 1:
        raise ValueError("head_size must be the innermost dimension, with stride 1")
    prefix = _plan_scratch.reserve(8 * (2 * num_requests + 2 + num_requests * num_kv_heads))
    return (
        query.data_ptr(),
        qt * size,
        qh * size,
        key_cache.data_ptr(),
        kb * size,
        kt * size,
        kh * size,
        value_cache.data_ptr(),
        vb * size,
        vt * size,
        vh * size,
        out.data_ptr(),
        ot * size,
        oh * size,
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        4 * block_table.stride(0),
        num_requests,
        num_kv_heads,
        num_heads // num_kv_heads,
        head_size,
        tokens_per_block,
        1 if causal else 0,
        sliding_window,
        _floats(alibi_slopes, num_heads),
        _floats(sinks, num_heads),
        prefix,
    )


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
    """Attention of a ragged batch over paged keys and values; see the package's docstring. Writes
    `out`.
    """
    _check_attention(query, key_cache, value_cache, out, causal, sliding_window)
    _check_metadata(query_start_loc, seq_lens, block_table)
    words = _attention_words(
        query,
        key_cache,
        value_cache,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        causal,
        sliding_window,
        alibi_slopes,
        sinks,
    )
    dtype, shares, scales = query.dtype, SHARES * num_threads(), (scale, logits_soft_cap)
    if recording() is not None:
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        sizes = seq_lens.shape[0], num_kv_heads, num_heads // num_kv_heads, query.shape[2]
        most_keys = key_cache.shape[1] * block_table.shape[1]
        scratch, partial, most_rows = _reserve_for_any(query, sizes, most_keys)
        _attend_args.write(
            0, 0, 0, 0, 0, *words, scratch, partial, most_rows, shares, 0, *scales
        )
        _note_attention(dtype)
        return
    most_rows = _MOST_PARTIAL_BYTES // _partial_row_bytes(query.shape[2])
    _attend_args.write(0, 0, 0, 0, 0, *words, 0, 0, most_rows, shares, 0, *scales)
    _PLAN[dtype][0].run(_attend_args.address)
    items, partial_bytes, thread_bytes = _attend_args.read(attend_args.NUM_ITEMS, 3)
    (all_heads,) = _attend_args.read(attend_args.ALL_HEADS, 1)
    if not items:
        return
    threads = min(num_threads(), items)
    scratch, partial = (
        _thread_scratch.reserve(threads * thread_bytes),
        _partial_scratch.reserve(partial_bytes),
    )
    _attend_args.write(
        0, 0, items, partial_bytes, thread_bytes, *words, scratch, partial, most_rows,
        shares, all_heads, *scales
    )
    launch(_ATTEND[dtype][0], _attend_args.address, threads, long=items > _MANY_ITEMS)


def _partial_row_bytes(head_size: int) -> int:
    """Bytes, or some more, of a row's partial result: its sums and the softmax's state."""
    return 4 * (head_size + 2 * host_target().lanes)


def _reserve_for_any(
    query: torch.Tensor, sizes: tuple[int, int, int, int], most_keys: int
) -> tuple[int, int, int]:
    """(scratch, partial results, rows of these) for as many tokens or fewer, of as many requests or
    fewer, of up to `most_keys` keys each: a recorded attention must hold for all."""
    num_requests, num_kv_heads, group, head_size = sizes
    _PLAN[query.dtype][0].run(_plan_of_nothing(query.dtype, group, head_size))
    (thread_bytes,) = _size_args.read(attend_args.THREAD_BYTES, 1)
    row_bytes = _partial_row_bytes(head_size)
    rows = min(query.shape[0] * group, num_requests * SPLIT_ROWS)
    partial_rows = min(
        rows * num_kv_heads * -(-most_keys // CHUNK), _MOST_PARTIAL_BYTES // row_bytes
    )
    return (
        _thread_scratch.reserve(num_threads() * thread_bytes),
        _partial_scratch.reserve(partial_rows * row_bytes),
        partial_rows,
    )


def _plan_of_nothing(dtype: torch.dtype, group: int, head_size: int) -> int:
    """Address of arguments for a plan without requests, which tells the scratch of a thread."""
    words = [0] * 28
    words[20], words[21] = group, head_size
    words[27] = _nothing_scratch.reserve(64)
    _size_args.write(0, 0, 0, 0, 0, *words, 0, 0, 0, 1, 0, 0.0, 0.0)
    return _size_args.address


def _note_attention(dtype: torch.dtype) -> None:
    recorder, args = recording(), _attend_args.copy()
    for scratch in (_plan_scratch, _thread_scratch, _partial_scratch):
        recorder.kept.append(scratch.storage)
    recorder.note(_PLAN[dtype][0], args, serial=True, counters=2)
    recorder.note(_ATTEND[dtype][0], args, counters=2)


def _floats(values: torch.Tensor | None, count: int) -> int:
    if values is None:
        return 0
    if values.dtype != torch.float32 or values.numel() != count or not values.is_contiguous():
        raise ValueError(
            "alibi slopes and sinks must be contiguous float32, "
            f"one for each of {count} query heads"
        )
    return values.data_ptr()


def _check_attention(query, key_cache, value_cache, out, causal: bool, sliding_window: int) -> None:
    dtype, shape, key_shape = query.dtype, query.shape, key_cache.shape
    if not (key_cache.dtype is dtype and value_cache.dtype is dtype and out.dtype is dtype):
        raise ValueError(
            f"query {dtype}, caches {key_cache.dtype}/{value_cache.dtype} and out {out.dtype} "
            "must be the same dtype"
        )
    if shape[2] % 2 or key_shape[3] != shape[2] or value_cache.shape != key_shape:
        raise ValueError(
            f"head size must be even and the same in query {tuple(shape)}, "
            f"key cache {tuple(key_shape)} "
            f"and value cache {tuple(value_cache.shape)}"
        )
    if shape[1] % key_shape[2] or out.shape != shape:
        raise ValueError(
            f"{shape[1]} query heads over {key_shape[2]} KV heads, out {tuple(out.shape)}"
        )
    if sliding_window < 0 or (sliding_window and not causal):
        raise ValueError(
            f"sliding_window={sliding_window} needs causal attention and a window of at least 0"
        )


def _check_metadata(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> None:
    int32 = torch.int32
    if (
        query_start_loc.dtype is not int32
        or seq_lens.dtype is not int32
        or block_table.dtype is not int32
    ):
        raise ValueError(
            f"query_start_loc {query_start_loc.dtype}, seq_lens {seq_lens.dtype} and "
            f"block_table {block_table.dtype} must be int32"
        )
    if not (
        query_start_loc.is_contiguous() and seq_lens.is_contiguous() and block_table.stride(1) == 1
    ):
        raise ValueError("query_start_loc, seq_lens and the rows of block_table must be contiguous")
    if (
        query_start_loc.shape[0] != seq_lens.shape[0] + 1
        or block_table.shape[0] < seq_lens.shape[0]
    ):
        raise ValueError(
            f"{seq_lens.shape[0]} requests need {seq_lens.shape[0] + 1} query starts "
            f"(got {query_start_loc.shape[0]}) "
            f"and as many block table rows (got {block_table.shape[0]})"
        )

# SPDX-License-Identifier: Apache-2.0
"""Checks, strides, tile sizes, launch. See the package's docstring for the contract."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from vllm.triton_utils import is_interpreted, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.ops.paged_batch import PagedBatch

from .attention_kernels import decode_kernel, merge_kernel, prefill_kernel
from .cache_kernels import reshape_and_cache_kernel

# As `PLAIN`, `PER_TENSOR` and `PER_TOKEN_HEAD` of the kernels.
_PLAIN, _PER_TENSOR, _PER_TOKEN_HEAD = 0, 1, 2
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A decode's keys are shared out to as many programs, each with at least as many keys.
_MOST_SPLITS = 16
_LEAST_KEYS_PER_SPLIT = 256
# tl.dot takes no less.
_LEAST_SIDE = 16


@dataclass(frozen=True)
class PagedKVCache:
    """K and V: views (NB, BS, H, D), of the model's dtype, int8 or float8_e4m3fn. With
    `key_scale` and `value_scale`, (NB, BS, H) float32, each token and head has scales of its own."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def quantisation(self) -> int:
        if self.key_scale is not None:
            return _PER_TOKEN_HEAD
        return _PLAIN if self.key.dtype in _MODEL_DTYPES else _PER_TENSOR

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return self.key_scale.stride() if self.key_scale is not None else (0, 0, 0)


@dataclass(frozen=True)
class TileSizes:
    """rows: (token, query head) pairs of a program; keys: taken at once. Powers of two from 16."""

    rows: int
    keys: int


@cache
def default_tile_sizes(padded_head_size: int, itemsize: int) -> TileSizes:
    """What fits the shared memory of any GPU; interpreted, each step costs the same and more is
    better."""
    if is_interpreted():
        return TileSizes(rows=128, keys=128)
    keys = 8192 // (padded_head_size * itemsize)
    return TileSizes(
        rows=64 if padded_head_size <= 128 else 32, keys=min(max(keys, _LEAST_SIDE), 128)
    )


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes key and value (T, H, D) into their slots.

    k_scale, v_scale: what one unit of a cache without scales of its own means, if it is quantised.
    """
    num_tokens, num_heads, head_size = key.shape
    _check_cache(cache)
    if cache.key.shape[2:] != key.shape[1:] or value.shape != key.shape:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit a cache "
            f"{tuple(cache.key.shape)}"
        )
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(head_size)
    rows = max(1, (65536 if is_interpreted() else 4096) // padded)
    reshape_and_cache_kernel[(cdiv(num_tokens * num_heads, rows),)](
        key, value, cache.key, cache.value, cache.key_scale, cache.value_scale, slot_mapping,
        key.stride(), value.stride(), cache.key.stride(), cache.value.stride(), cache.scale_strides,
        num_tokens * num_heads, k_scale, v_scale, NUM_HEADS=num_heads, D=head_size, D_PAD=padded,
        BLOCK_SIZE=cache.key.shape[1], ROWS=rows, QUANT=cache.quantisation,
        LARGEST=_LARGEST.get(cache.key.dtype, 0.0), IS_INT=cache.key.dtype is torch.int8,
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    cache: PagedKVCache,
    out: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile_sizes: TileSizes | None = None,
) -> None:
    """Attention of a batch over its pages; writes `out`.

    Raises:
        ValueError: shapes or dtypes do not fit, or a window without causal attention.
    """
    _check_cache(cache)
    _check_query(query, cache, out, batch, sliding_window)
    padded = max(triton.next_power_of_2(query.shape[2]), _LEAST_SIDE)
    sizes = tile_sizes or default_tile_sizes(padded, query.element_size())
    per_tensor = cache.quantisation == _PER_TENSOR
    call = _Call(
        query, cache, out, batch, scale * (k_scale if per_tensor else 1.0), sliding_window,
        logits_soft_cap or None, alibi_slopes, sinks, v_scale if per_tensor else 1.0, padded, sizes,
    )  # fmt: skip
    if batch.num_decodes:
        _decode(call)
    if batch.num_decodes < batch.num_reqs:
        _prefill(call)


@dataclass(frozen=True)
class _Call:
    """What both kinds of kernel are launched with."""

    query: torch.Tensor
    cache: PagedKVCache
    out: torch.Tensor
    batch: PagedBatch
    scale: float
    window: int
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    v_scale: float
    padded_head_size: int
    sizes: TileSizes

    @property
    def num_kv_heads(self) -> int:
        return self.cache.key.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def caches(self) -> tuple[torch.Tensor | None, ...]:
        cache = self.cache
        return cache.key, cache.value, cache.key_scale, cache.value_scale

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        cache = self.cache
        of_cache = cache.key.stride(), cache.value.stride(), cache.scale_strides
        return self.out.stride(), self.query.stride(), *of_cache

    @property
    def constants(self) -> dict[str, int]:
        return dict(
            D=self.query.shape[2], D_PAD=self.padded_head_size, TILE=self.sizes.keys,
            BLOCK_SIZE=self.cache.key.shape[1], WINDOW=self.window, QUANT=self.cache.quantisation,
        )  # fmt: skip


def _prefill(call: _Call) -> None:
    batch = call.batch
    padded_group = triton.next_power_of_2(call.group)
    rows = max(call.sizes.rows, padded_group)
    tiles = batch.prefill_tiles(rows // padded_group)
    if not len(tiles):
        return
    prefill_kernel[(len(tiles), call.num_kv_heads)](
        call.out, call.query, *call.caches, tiles, batch.query_start_loc, batch.seq_lens,
        batch.block_table, call.alibi_slopes, call.sinks, *call.strides, batch.block_table.stride(0),
        call.scale, call.soft_cap, call.v_scale, GROUP=call.group, GROUP_PAD=padded_group, ROWS=rows,
        CAUSAL=batch.causal, **call.constants,
    )  # fmt: skip


def _decode(call: _Call) -> None:
    batch, sizes = call.batch, call.sizes
    num_heads, head_size = call.query.shape[1:]
    # A window's keys begin in the middle of a tile.
    most_keys = min(batch.max_seq_len, call.window + sizes.keys) if call.window else batch.max_seq_len
    least = max(_LEAST_KEYS_PER_SPLIT, sizes.keys)
    splits = min(_MOST_SPLITS, max(1, cdiv(most_keys, least)))
    shared = dict(SPLITS=splits, LEAST=least, MOST_SPLITS=_MOST_SPLITS)
    # Without several splits nothing is written there.
    held = batch.num_decodes if splits > 1 else 0
    partial_acc = call.out.new_empty((held, num_heads, splits, head_size), dtype=torch.float32)
    partial_state = call.out.new_empty((held, num_heads, splits, 2), dtype=torch.float32)
    partial_strides = (num_heads * splits,)
    decode_kernel[(batch.num_decodes, call.num_kv_heads, splits)](
        call.out, partial_acc, partial_state, call.query, *call.caches, batch.query_start_loc,
        batch.seq_lens, batch.block_table, call.alibi_slopes, call.sinks, *call.strides,
        partial_strides, batch.block_table.stride(0), call.scale, call.soft_cap, call.v_scale,
        GROUP=call.group, ROWS=max(triton.next_power_of_2(call.group), _LEAST_SIDE),
        **call.constants, **shared,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(batch.num_decodes, num_heads)](
            call.out, partial_acc, partial_state, batch.query_start_loc, batch.seq_lens,
            call.out.stride(), partial_strides, call.v_scale, D=head_size,
            D_PAD=call.padded_head_size, TILE=sizes.keys, WINDOW=call.window, **shared,
        )  # fmt: skip


def _check_cache(cache: PagedKVCache) -> None:
    dtype = cache.key.dtype
    if dtype not in (*_MODEL_DTYPES, *_LARGEST) or cache.value.dtype is not dtype:
        known = ", ".join(str(d).removeprefix("torch.") for d in (*_MODEL_DTYPES, *_LARGEST))
        raise ValueError(f"a KV cache of {dtype} and {cache.value.dtype}: supported are {known}")
    if dtype is torch.int8 and cache.key_scale is None:
        raise ValueError("an int8 KV cache needs a scale for each token and head")


def _check_query(
    query: torch.Tensor, cache: PagedKVCache, out: torch.Tensor, batch: PagedBatch, window: int
) -> None:
    shape, kv_shape = query.shape, cache.key.shape
    if query.dtype not in _MODEL_DTYPES or out.dtype is not query.dtype or out.shape != shape:
        raise ValueError(f"query {query.dtype} {tuple(shape)}, out {out.dtype} {tuple(out.shape)}")
    if shape[2] != kv_shape[3] or cache.value.shape != kv_shape or shape[1] % kv_shape[2]:
        raise ValueError(
            f"query {tuple(shape)} does not fit K {tuple(kv_shape)} and V {tuple(cache.value.shape)}"
        )
    if window < 0 or (window and not batch.causal):
        raise ValueError(f"a sliding window of {window} needs causal attention and at least 1 token")
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
        if tensor.dtype is not torch.int32 or (tensor.numel() > 1 and tensor.stride(-1) != 1):
            raise ValueError("query_start_loc, seq_lens and block_table must be dense and int32")

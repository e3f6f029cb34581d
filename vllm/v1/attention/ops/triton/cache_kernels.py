# SPDX-License-Identifier: Apache-2.0
"""Writes K and V of new tokens into their slots, quantised where the cache is."""

from __future__ import annotations

from vllm.triton_utils import tl, triton

# How elements become those of the cache.
PLAIN = tl.constexpr(0)
PER_TENSOR = tl.constexpr(1)
PER_TOKEN_HEAD = tl.constexpr(2)


@triton.jit
def _quantise(x, scale, LARGEST: tl.constexpr, IS_INT: tl.constexpr):
    """x / scale within what the cache's dtype holds. x: (rows, D) float32; scale: scalar or (rows, 1)."""
    x = x / scale
    if IS_INT:
        x = tl.floor(x + 0.5)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _write(
    source, source_strides, cache, cache_strides, scales, scale_strides, tokens, heads, blocks, places,
    keep, tensor_scale, D: tl.constexpr, D_PAD: tl.constexpr, QUANT: tl.constexpr,
    LARGEST: tl.constexpr, IS_INT: tl.constexpr,
):  # fmt: skip
    """One of K and V. A row is a head of a token; `keep`: rows that have a slot."""
    dims = tl.arange(0, D_PAD)
    mask = keep[:, None] & (dims < D)[None, :]
    at = tokens * source_strides[0] + heads * source_strides[1]
    x = tl.load(source + at[:, None] + dims[None, :] * source_strides[2], mask=mask, other=0.0)
    if QUANT == PER_TENSOR:
        x = _quantise(x.to(tl.float32), tensor_scale, LARGEST, IS_INT)
    if QUANT == PER_TOKEN_HEAD:
        x = x.to(tl.float32)
        scale = tl.max(tl.abs(x), axis=1) / LARGEST
        to_scale = blocks * scale_strides[0] + places * scale_strides[1] + heads * scale_strides[2]
        tl.store(scales + to_scale, scale, mask=keep)
        # A row of zeros has no scale: any will do.
        x = _quantise(x, tl.where(scale == 0.0, 1.0, scale)[:, None], LARGEST, IS_INT)
    to = blocks * cache_strides[0] + places * cache_strides[1] + heads * cache_strides[2]
    to = cache + to[:, None] + dims[None, :] * cache_strides[3]
    tl.store(to, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def reshape_and_cache_kernel(
    key, value, key_cache, value_cache, key_scales, value_scales, slot_mapping,
    key_strides, value_strides, key_cache_strides, value_cache_strides, scale_strides,
    num_rows, k_scale, v_scale, NUM_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, QUANT: tl.constexpr, LARGEST: tl.constexpr,
    IS_INT: tl.constexpr,
):  # fmt: skip
    """A program writes ROWS rows, each a head of a token. A negative slot is not written."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1).to(tl.int64)
    keep = slots >= 0
    slots = tl.where(keep, slots, 0)
    blocks, places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    _write(
        key, key_strides, key_cache, key_cache_strides, key_scales, scale_strides, tokens, heads,
        blocks, places, keep, k_scale, D, D_PAD, QUANT, LARGEST, IS_INT,
    )  # fmt: skip
    _write(
        value, value_strides, value_cache, value_cache_strides, value_scales, scale_strides, tokens,
        heads, blocks, places, keep, v_scale, D, D_PAD, QUANT, LARGEST, IS_INT,
    )  # fmt: skip

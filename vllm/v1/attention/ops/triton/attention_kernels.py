# SPDX-License-Identifier: Apache-2.0
"""Attention over paged K and V: many tokens of a request, or one token with its keys split up.

A program works on the query heads of one KV head. Its rows are (token, head of the group) pairs,
padded to powers of two; it goes over the keys a tile at a time with a running softmax (Milakov and
Gimelshein, https://arxiv.org/abs/1805.02867; in tiles: https://arxiv.org/abs/2205.14135) and leaves
out tiles that no row sees. Peaks are in units of log2.

Each key is looked up in the block table by itself, or a tile at once where blocks are whole tiles:
a tile never reaches into the block that happens to lie behind.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton

from .cache_kernels import PER_TOKEN_HEAD

_LOG2_E = tl.constexpr(1.4426950408889634)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _cap(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)."""
    return soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / soft_cap * (2.0 * _LOG2_E))))


@triton.jit
def _load_rows(pointer, strides, token, heads, mask, D: tl.constexpr, D_PAD: tl.constexpr):
    """Pointers to and mask of rows (token, head)."""
    dims = tl.arange(0, D_PAD)
    at = token.to(tl.int64) * strides[0] + heads * strides[1]
    return pointer + at[:, None] + dims[None, :] * strides[2], mask[:, None] & (dims < D)[None, :]


@triton.jit
def _first_state(sinks, heads, mask, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """Peak, sum and weighted V before any key; a sink counts as a key without a value."""
    total = tl.zeros([ROWS], tl.float32)
    peak = total + _NONE
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32)
        peak, total = sink * _LOG2_E, total + 1.0
    return peak, total, tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def _attend(
    query, positions, slopes, peak, total, acc, key_cache, value_cache, key_scales, value_scales,
    key_strides, value_strides, scale_strides, table, kv_head, begin, end, scale, soft_cap,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Takes keys `begin` to `end` (exclusive) into the state. Others in the tiles are not loaded:
    what stands there may be NaN, and 0 * NaN is NaN."""
    lane, dims = tl.arange(0, TILE), tl.arange(0, D_PAD)
    for start in range(begin // TILE * TILE, end, TILE):
        keys = start + lane
        wanted = (keys >= begin) & (keys < end)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            place = start % BLOCK_SIZE + lane
        else:
            block = tl.load(table + keys // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
            place = keys % BLOCK_SIZE
        mask = wanted[:, None] & (dims < D)[None, :]
        at = block * key_strides[0] + place * key_strides[1] + kv_head * key_strides[2]
        at = key_cache + at[:, None] + dims[None, :] * key_strides[3]
        key = tl.load(at, mask=mask, other=0.0).to(query.dtype)
        at = block * value_strides[0] + place * value_strides[1] + kv_head * value_strides[2]
        at = value_cache + at[:, None] + dims[None, :] * value_strides[3]
        value = tl.load(at, mask=mask, other=0.0)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if QUANT == PER_TOKEN_HEAD:
            at = block * scale_strides[0] + place * scale_strides[1] + kv_head * scale_strides[2]
            scores *= tl.load(key_scales + at, mask=wanted, other=0.0)[None, :]
            value_scale = tl.load(value_scales + at, mask=wanted, other=0.0)
            value = value.to(tl.float32) * value_scale[:, None]
        if soft_cap is not None:
            scores = _cap(scores, soft_cap)
        behind = positions[:, None] - keys[None, :]
        if slopes is not None:
            scores -= slopes[:, None] * behind
        seen = wanted[None, :]
        if CAUSAL:
            seen = seen & (behind >= 0)
        if WINDOW > 0:
            seen = seen & (behind < WINDOW)
        scores = tl.where(seen, scores * _LOG2_E, _NONE)

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == _NONE, 0.0, new_peak)  # a row that has seen no key yet
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(peak - base)
        total = total * faded + tl.sum(weights, axis=1)
        weighted = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        acc = acc * faded[:, None] + weighted
        peak = new_peak
    return peak, total, acc


@triton.jit
def prefill_kernel(
    out, query, key_cache, value_cache, key_scales, value_scales, tiles, query_start_loc, seq_lens,
    block_table, alibi_slopes, sinks, out_strides, query_strides, key_strides, value_strides,
    scale_strides, table_stride, scale, soft_cap, v_scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads): ROWS // GROUP_PAD tokens of one request, see `prefill_tiles`."""
    request = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + request)
    num_tokens = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    computed = seq_len - num_tokens

    row = tl.arange(0, ROWS)
    token, in_group = first + row // GROUP_PAD, row % GROUP_PAD
    mask = (token < num_tokens) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    begin, end = 0, seq_len
    if CAUSAL:
        end = tl.minimum(seq_len, computed + first + ROWS // GROUP_PAD)
    if WINDOW > 0:
        begin = tl.maximum(0, computed + first - WINDOW + 1)

    at, in_query = _load_rows(query, query_strides, start + token, heads, mask, D, D_PAD)
    rows = tl.load(at, mask=in_query, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=mask, other=0.0)
    peak, total, acc = _first_state(sinks, heads, mask, ROWS, D_PAD)
    table = block_table + request.to(tl.int64) * table_stride
    peak, total, acc = _attend(
        rows, computed + token, slopes, peak, total, acc, key_cache, value_cache, key_scales,
        value_scales, key_strides, value_strides, scale_strides, table, kv_head, begin, end, scale,
        soft_cap, D, D_PAD, TILE, BLOCK_SIZE, CAUSAL, WINDOW, QUANT,
    )  # fmt: skip
    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    at, in_out = _load_rows(out, out_strides, start + token, heads, mask, D, D_PAD)
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _keys_and_share(seq_len, TILE: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr,
                    MOST_SPLITS: tl.constexpr):  # fmt: skip
    """The first key that a request's next token sees, that key's tile, and keys in each of its
    splits: these depend on the request alone, so that its neighbours change no bit of it."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, seq_len - WINDOW)
    origin = begin // TILE * TILE
    share = ((seq_len - origin + MOST_SPLITS - 1) // MOST_SPLITS + TILE - 1) // TILE * TILE
    return begin, origin, tl.maximum(share, LEAST)


@triton.jit
def decode_kernel(
    out, partial_acc, partial_state, query, key_cache, value_cache, key_scales, value_scales,
    query_start_loc, seq_lens, block_table, alibi_slopes, sinks, out_strides, query_strides,
    key_strides, value_strides, scale_strides, partial_strides, table_stride, scale, soft_cap, v_scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, QUANT: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, KV heads, SPLITS): the one token of a request over a share of its keys. With
    several splits weighted V goes to `partial_acc` (requests, heads, splits, D), peak and sum to
    `partial_state` (requests, heads, splits, 2); both float32."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    first_key, origin, share = _keys_and_share(seq_len, TILE, WINDOW, LEAST, MOST_SPLITS)
    begin = origin + split * share
    end = tl.minimum(begin + share, seq_len)
    if (split > 0) & (begin >= end):
        return
    row = tl.arange(0, ROWS)
    mask, heads = row < GROUP, kv_head * GROUP + row
    token = tl.load(query_start_loc + request) + row * 0
    at, in_query = _load_rows(query, query_strides, token, heads, mask, D, D_PAD)
    rows = tl.load(at, mask=in_query, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=mask, other=0.0)
    peak, total, acc = _first_state(sinks, heads, mask, ROWS, D_PAD)
    if sinks is not None:
        peak = tl.where(split == 0, peak, _NONE)
        total = tl.where(split == 0, total, 0.0)
    table = block_table + request.to(tl.int64) * table_stride
    peak, total, acc = _attend(
        rows, seq_len - 1 + row * 0, slopes, peak, total, acc, key_cache, value_cache, key_scales,
        value_scales, key_strides, value_strides, scale_strides, table, kv_head,
        tl.maximum(begin, first_key), end, scale, soft_cap, D, D_PAD, TILE, BLOCK_SIZE, False, 0,
        QUANT,
    )  # fmt: skip
    if SPLITS == 1:
        acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        at, in_out = _load_rows(out, out_strides, token, heads, mask, D, D_PAD)
        tl.store(at, acc.to(out.dtype.element_ty), mask=in_out)
    else:
        place = request.to(tl.int64) * partial_strides[0] + heads * SPLITS + split
        dims = tl.arange(0, D_PAD)
        at = partial_acc + place[:, None] * D + dims[None, :]
        tl.store(at, acc, mask=mask[:, None] & (dims < D)[None, :])
        tl.store(partial_state + place * 2, peak, mask=mask)
        tl.store(partial_state + place * 2 + 1, total, mask=mask)


@triton.jit
def merge_kernel(
    out, partial_acc, partial_state, query_start_loc, seq_lens, out_strides, partial_strides, v_scale,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, query heads): puts the splits of `decode_kernel` together."""
    request, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + request)
    _, origin, share = _keys_and_share(seq_len, TILE, WINDOW, LEAST, MOST_SPLITS)
    split, dims = tl.arange(0, MOST_SPLITS), tl.arange(0, D_PAD)
    used = (split == 0) | (origin + split * share < seq_len)
    place = request.to(tl.int64) * partial_strides[0] + head * SPLITS + split
    peaks = tl.load(partial_state + place * 2, mask=used, other=_NONE)
    totals = tl.load(partial_state + place * 2 + 1, mask=used, other=0.0)
    mask = used[:, None] & (dims < D)[None, :]
    acc = tl.load(partial_acc + place[:, None] * D + dims[None, :], mask=mask, other=0.0)
    peak = tl.max(peaks, axis=0)
    faded = tl.exp2(peaks - tl.where(peak == _NONE, 0.0, peak))
    total = tl.sum(totals * faded, axis=0)
    merged = tl.sum(acc * faded[:, None], axis=0) * v_scale / tl.where(total == 0.0, 1.0, total)
    token = tl.load(query_start_loc + request).to(tl.int64)
    at = out + token * out_strides[0] + head * out_strides[1] + dims * out_strides[2]
    tl.store(at, merged.to(out.dtype.element_ty), mask=dims < D)

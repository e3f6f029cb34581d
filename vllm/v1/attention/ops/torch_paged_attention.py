# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch, for any device: the meaning of the other kernels, not their speed.

K and V are views (NB, BS, H, D) of any strides. What the options mean, and that stale bytes change
nothing, is as in `vllm.v1.attention.ops.triton`.
"""

from __future__ import annotations

import torch

from vllm.v1.attention.ops.paged_batch import PagedBatch


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes key and value (T, H, D) into their slots, int64 (T,); negative: not written."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, places] = key[written].to(key_cache.dtype)
    value_cache[blocks, places] = value[written].to(value_cache.dtype)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of a batch over its pages, a request at a time; writes `out`, (T, Hq, D) as `query`.

    Raises:
        ValueError: a window without causal attention.
    """
    if sliding_window and not batch.causal:
        raise ValueError(f"a sliding window of {sliding_window} needs causal attention")
    starts = batch.query_start_loc_cpu.tolist()
    for request, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        num_tokens = rows.stop - rows.start
        first = max(0, seq_len - num_tokens + 1 - sliding_window) if sliding_window else 0
        places = torch.arange(first, seq_len, device=query.device)
        block_size = key_cache.shape[1]
        blocks = batch.block_table[request, places // block_size].long()
        key, value = (c[blocks, places % block_size] for c in (key_cache, value_cache))
        positions = torch.arange(seq_len - num_tokens, seq_len, device=query.device)
        behind = positions[:, None] - places
        hidden = (behind < 0) & batch.causal
        if sliding_window:
            hidden |= behind >= sliding_window
        out[rows] = _attend(
            query[rows], key, value, behind, hidden, scale, logits_soft_cap, alibi_slopes, sinks
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    behind: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One request. query: (n, Hq, D); key, value: (keys, H, D); behind, hidden: (n, keys)."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,khd->hnk", query.float(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * behind
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, sink), dim=-1)
    # A row that sees no key has no softmax; its output is zero.
    sees_none = hidden.all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]].masked_fill(sees_none, 0.0)
    return torch.einsum("hnk,khd->nhd", weights, value).to(query.dtype)

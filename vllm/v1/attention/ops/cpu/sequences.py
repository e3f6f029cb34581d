# SPDX-License-Identifier: Apache-2.0
"""Attention over whole sequences that lie one behind the other, by the kernels that read pages."""

from __future__ import annotations

import torch

from .launchers import paged_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports_sequences(head_size: int, dtype: torch.dtype) -> bool:
    """Whether `sequence_attention` has kernels for such heads."""
    return head_size % 2 == 0 and dtype in _DTYPES


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Every token attends to all of its sequence: (T, H, D) contiguous.

    Nothing is copied: keys are read as a cache whose blocks of `max_seqlen` tokens begin at every
    token, so that a sequence is one block, the number of which is that of its first token.

        block 0: token 0 1 2 3 ..       block 1: token 1 2 3 4 ..

    Args:
        query, key, value: (T, H, D), (T, KV heads, D); rows and heads may lie apart.
        cu_seqlens: (sequences + 1,) int32: where they begin, and T.
        max_seqlen: the longest one's tokens, at least 1.

    Raises:
        ValueError: as `paged_attention` says.
    """
    out = query.new_empty(query.shape)
    paged_attention(
        query,
        _overlapping_blocks(key, max_seqlen),
        _overlapping_blocks(value, max_seqlen),
        out,
        cu_seqlens,
        cu_seqlens.diff(),
        cu_seqlens[:-1, None],
        scale,
        causal=False,
    )
    return out


def _overlapping_blocks(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """(T, heads, D) as (blocks, tokens, heads, D). The last blocks would pass the end of memory: they
    are left out of the shape, and what is read of them lies before it."""
    row, head, one = x.stride()
    shape = (x.shape[0] - tokens + 1, tokens, *x.shape[1:])
    return x.as_strided(shape, (row, row, head, one))

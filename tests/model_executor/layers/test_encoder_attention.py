# SPDX-License-Identifier: Apache-2.0
"""Attention inside an encoder, against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import CrossAttention, MMEncoderAttention
from vllm.v1.attention.backend import AttentionType

HEAD_SIZE = 8


def expected(q, k, v, num_heads: int, num_kv_heads: int, scale: float) -> torch.Tensor:
    """One sequence, (seq, hidden)."""
    q, k, v = (x.double().unflatten(-1, (-1, HEAD_SIZE)) for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1).float()


def make_qkv(seq: int, num_heads: int, num_kv_heads: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    widths = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(seq, n * HEAD_SIZE, generator=generator) for n in widths]


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_shapes_and_heads(num_kv_heads, scale):
    """(seq, hidden), (batch, seq, hidden) and (batch, seq, heads, head_size) are the same numbers;
    no mask anywhere."""
    layer = MMEncoderAttention(4, HEAD_SIZE, scale, num_kv_heads)
    q, k, v = make_qkv(11, 4, num_kv_heads)
    wanted = expected(q, k, v, 4, num_kv_heads, scale or HEAD_SIZE**-0.5)
    flat = layer(q, k, v)
    torch.testing.assert_close(flat, wanted)
    batched = layer(*(x.expand(3, *x.shape) for x in (q, k, v)))
    torch.testing.assert_close(batched, wanted.expand(3, *wanted.shape))
    by_head = layer(*(x[None].unflatten(-1, (-1, HEAD_SIZE)) for x in (q, k, v)))
    torch.testing.assert_close(by_head, wanted[None].unflatten(-1, (-1, HEAD_SIZE)))


@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [16, 1]])
@pytest.mark.parametrize("is_batched", [True, False])
def test_sequences_one_behind_the_other(lengths, is_batched):
    """With cu_seqlens no token sees another sequence's."""
    layer = MMEncoderAttention(2, HEAD_SIZE)
    parts = [make_qkv(n, 2, 2, seed=i) for i, n in enumerate(lengths)]
    wanted = torch.cat([expected(*part, 2, 2, HEAD_SIZE**-0.5) for part in parts])
    q, k, v = (torch.cat(x) for x in zip(*parts))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    if is_batched:
        q, k, v, wanted = q[None], k[None], v[None], wanted[None]
    torch.testing.assert_close(layer(q, k, v, cu_seqlens, torch.tensor(max(lengths))), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [16, 20, 7])
def test_long_sequences_inside_a_fused_projection(dtype, head_size):
    """Longer than the 256 keys that are summed at once, the last one at the end of memory; with a head
    size that no kernel does, torch computes. Fault: keys of the sequence behind, or of q for k."""
    lengths, heads = [300, 1, 513], 3
    layer = MMEncoderAttention(heads, head_size)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3 * heads * head_size).to(dtype)
    q, k, v = qkv.chunk(3, dim=-1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = layer(q, k, v, cu_seqlens, torch.tensor(max(lengths)))
    wanted = layer.forward_native(q.float(), k.float(), v.float(), cu_seqlens)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
    assert out.dtype is dtype and out.is_contiguous()


def test_refusals():
    with pytest.raises(ValueError, match="encoder.attn: 3 query heads are no multiple of 2 KV"):
        MMEncoderAttention(3, HEAD_SIZE, num_kv_heads=2, prefix="encoder.attn")
    q = torch.zeros(2, 4, 16)
    with pytest.raises(ValueError, match="batch of 2; flatten"):
        MMEncoderAttention(2, HEAD_SIZE)(q, q, q, torch.tensor([0, 1, 4]))
    with set_current_vllm_config(VllmConfig()), pytest.raises(ValueError, match="not decoder; use"):
        CrossAttention(2, HEAD_SIZE, 1.0, attn_type=AttentionType.DECODER)

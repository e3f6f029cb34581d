# SPDX-License-Identifier: Apache-2.0
"""The plain torch reference against float64: what the other kernels mean must be right itself."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged_oracle import NAN, Requests, make_key_value
from vllm.v1.attention.ops.torch_paged_attention import paged_attention, reshape_and_cache

CPU = torch.device("cpu")
MIXED = [(1, 40), (1, 1), (5, 5), (17, 33), (2, 50), (1, 16)]
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([0.0, 2.0, -1.0, 5.0])


def run(requests: Requests, layout: str = "fused_nhd", fill: float = NAN, **options) -> torch.Tensor:
    dtype, (_, heads, head_size) = requests.query.dtype, requests.key.shape
    key, value = make_key_value(
        layout, requests.num_blocks, requests.block_size, heads, head_size, dtype, fill, CPU
    )
    padding = torch.full((2, heads, head_size), 1e3, dtype=dtype)  # tokens without a slot
    slots = torch.cat((requests.slots, torch.tensor([-1, -1])))
    padded = torch.cat((requests.key, padding)), torch.cat((requests.value, padding))
    reshape_and_cache(*padded, key, value, slots)
    out = torch.full((len(requests.query) + 2, *requests.query.shape[1:]), NAN, dtype=dtype)
    batch = requests.batch(CPU)
    paged_attention(requests.query, key, value, out, batch, head_size**-0.5, **options)
    assert out[-2:].isnan().all()
    return out[:-2]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["fused_nhd", "fused_hnd", "kv_first"])
def test_against_float64(layout, dtype):
    """Every slot that is not a key holds NaN, and so do rows that are not asked for."""
    requests = Requests(MIXED, dtype=dtype, head_size=80, block_size=24)
    difference = (run(requests, layout).double() - requests.expected()).abs().max()
    assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "options",
    [
        dict(sliding_window=1),
        dict(sliding_window=17),
        dict(logits_soft_cap=2.0),
        dict(alibi_slopes=SLOPES, sliding_window=300),
        dict(sinks=SINKS),
        dict(sliding_window=5, logits_soft_cap=2.0, alibi_slopes=SLOPES, sinks=SINKS),
    ],
    ids=lambda options: "+".join(options),
)
def test_options(options):
    requests = Requests(MIXED, head_size=16)
    assert (run(requests, **options).double() - requests.expected(**options)).abs().max() < 4e-6


def test_cross_attention_and_requests_without_keys():
    requests = Requests([(1, 33), (1, 0), (7, 30), (3, 1), (2, 0)], causal=False, head_size=16)
    assert (run(requests).double() - requests.expected()).abs().max() < 4e-6
    with pytest.raises(ValueError, match="needs causal attention"):
        run(requests, sliding_window=3)


def test_stale_bytes_change_no_bit():
    requests = Requests(MIXED, head_size=16)
    clean = run(requests, fill=0.0)
    for fill in (NAN, float("inf"), -3e4):
        assert torch.equal(run(requests, fill=fill), clean)

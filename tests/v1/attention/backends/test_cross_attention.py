# SPDX-License-Identifier: Apache-2.0
"""Cross-attention of each backend that runs here, step by step, against a plain loop in float64.
(TRITON_ATTN's kernels have tests of their own, and whole engines on the emulated platforms.)"""

from __future__ import annotations

import pytest
import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.torch_attn import TorchAttentionBackend
from vllm.v1.kv_cache_interface import CrossAttentionSpec

PAGE, HEADS, KV_HEADS, HEAD_SIZE, NUM_PAGES = 4, 4, 2, 8, 16
CPU = torch.device("cpu")


class Layer:
    """One layer of a backend over a cache full of NaN."""

    def __init__(self, backend) -> None:
        spec = CrossAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        self.layer_name = "cross"
        self.builder = backend.get_builder_cls()(spec, ["cross"], VllmConfig(), CPU)
        self.impl = backend.get_impl_cls()(
            HEADS, HEAD_SIZE, 0.3, KV_HEADS, attn_type=AttentionType.ENCODER_DECODER
        )
        shape = backend.get_kv_cache_shape(NUM_PAGES, PAGE, KV_HEADS, HEAD_SIZE)
        self.kv_cache = torch.full(shape, float("nan"))

    def step(self, query_lens, encoder_lens, tables, query, key=None, value=None, slots=()):
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        seq_lens = torch.tensor(encoder_lens, dtype=torch.int32)
        width = max(map(len, tables))
        rows = [[*table, *[0] * (width - len(table))] for table in tables]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(query_lens),
            num_actual_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(encoder_lens),
            block_table_tensor=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=False,
            encoder_seq_lens=seq_lens,
        )
        metadata = self.builder.build(0, common)
        output = torch.full_like(query, 7.0)
        self.impl.forward(self, query, key, value, self.kv_cache, metadata, output)
        return output


def expected(query, key, value) -> torch.Tensor:
    """One request: (n, heads, head_size) over all of its keys."""
    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    weights = (torch.einsum("qhd,khd->hqk", query.double(), key) * 0.3).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).float()


@pytest.mark.parametrize("backend", [CPUAttentionBackend, TorchAttentionBackend])
def test_steps_with_and_without_new_inputs(backend):
    """Encoded are: request a; then b, beside a; then none. Every request's queries, more or fewer
    than its encoder tokens, see all of them and nobody else's; what is not encoded is not written;
    rows beyond the batch stay."""
    generator = torch.Generator().manual_seed(0)
    lengths, tables = [9, 2], [[5, 1, 7], [3]]
    slots = [[t[p // PAGE] * PAGE + p % PAGE for p in range(n)] for n, t in zip(lengths, tables)]
    keys, values = (
        [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator) for n in lengths]
        for _ in range(2)
    )
    layer = Layer(backend)

    def check(query_lens: list[int], encoded: int | None) -> None:
        count = len(query_lens)
        query = torch.randn(sum(query_lens) + 1, HEADS, HEAD_SIZE, generator=generator)
        new = () if encoded is None else (keys[encoded], values[encoded], slots[encoded])
        out = layer.step(query_lens, lengths[:count], tables[:count], query, *new)
        parts = query[:-1].split(query_lens)
        wanted = [expected(*part) for part in zip(parts, keys, values)]
        torch.testing.assert_close(out[:-1], torch.cat(wanted), atol=1e-5, rtol=1e-5)
        assert (out[-1] == 7.0).all()

    check([12], encoded=0)
    check([1, 5], encoded=1)
    before = layer.kv_cache.clone()
    check([1, 1], encoded=None)
    assert torch.equal(layer.kv_cache.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_what_a_backend_does_not_do(attn_type):
    """Refused when the layer is made, by the backend's name."""
    for backend, refused in (
        (CPUAttentionBackend, attn_type),
        (TorchAttentionBackend, attn_type),
        (RocmAttentionBackend, AttentionType.ENCODER_DECODER),
    ):
        with pytest.raises(ValueError, match=f"{backend.get_name()} does not do {refused.value}"):
            backend.get_impl_cls()(HEADS, HEAD_SIZE, 1.0, KV_HEADS, attn_type=refused)

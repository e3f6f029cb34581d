# SPDX-License-Identifier: Apache-2.0
"""Attention of two groups at once, on different layouts over one allocation, with real kernels.

The kernels take K and V as two strided views, so that one set of them runs every layout here.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.v1.worker.kv_cache_fakes import (
    BlocksFirst,
    BlocksFirstHND,
    Fused,
    FusedNHD,
    KVFirst,
    full_spec,
    group,
    shared_config,
)
from vllm.v1.attention.kv_cache_plan import observe_layer
from vllm.v1.attention.ops.cpu import paged_attention, reshape_and_cache
from vllm.v1.core.kv_cache_groups import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_geometry import KVCacheGeometry, fused_fields, storage_bytes
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.gpu.block_table import BlockTable

BACKENDS = [KVFirst, BlocksFirst, BlocksFirstHND, Fused, FusedNHD]
PAIRS = list(itertools.combinations(BACKENDS, 2))
TOKENS, HEADS, HEAD_SIZE, NUM_PAGES = 8, 2, 4, 16


class Group:
    """One group's cache, its block tables and, for the truth, its K and V as they were given."""

    def __init__(self, key_value, spec, kernel_block_size, num_reqs, seed):
        self.key_cache, self.value_cache = key_value
        self.spec = spec
        self.table = BlockTable(spec.block_size, kernel_block_size, num_reqs, NUM_PAGES)
        self.kernel_block_size = kernel_block_size
        generator = torch.Generator().manual_seed(seed)
        shape = (2, num_reqs, 3 * TOKENS, spec.num_kv_heads, spec.head_size)
        self.key, self.value = torch.randn(shape, generator=generator)

    def write(self, row: int, start: int, stop: int) -> None:
        positions = torch.arange(start, stop).numpy()
        slots = torch.empty(stop - start, dtype=torch.int64)
        rows = torch.full((stop - start,), row).numpy()
        self.table.slots(rows, positions, slots.numpy())
        key, value = self.key[row, start:stop], self.value[row, start:stop]
        reshape_and_cache(key, value, self.key_cache, self.value_cache, slots)

    def attend(
        self, query: torch.Tensor, lengths: list[int], is_cross: bool = False
    ) -> torch.Tensor:
        """query: (num_reqs, heads, head_size), one token a request; of cross-attention any number of
        tokens for each, which see all keys."""
        out = torch.empty_like(query)
        starts = torch.arange(0, len(query) + 1, len(query) // len(lengths), dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        table = torch.from_numpy(self.table.table)
        caches = self.key_cache, self.value_cache
        paged_attention(
            query, *caches, out, starts, seq_lens, table, 0.5, causal=not is_cross
        )
        return out

    def truth(self, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        rows = []
        for row, length in enumerate(lengths):
            key, value = self.key[row, :length].double(), self.value[row, :length].double()
            scores = torch.einsum("hd,thd->ht", query[row].double(), key) * 0.5
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value))
        return torch.stack(rows).float()


SPEC = full_spec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE)


def make_groups(backends, kernel_block_sizes, num_reqs, specs) -> list[Group]:
    groups = [
        group(b, spec, f"layer{i}", group_id=i) for i, (b, spec) in enumerate(zip(backends, specs))
    ]
    raw = torch.full((NUM_PAGES * specs[0].page_size_bytes,), 0x7F, dtype=torch.int8)  # all NaN
    raws = {one.layer_names[0]: raw for one in groups}
    config = shared_config(NUM_PAGES, groups)
    caches = _reshape_kv_cache(groups, raws, "auto", kernel_block_sizes, {}, config)
    made = []
    for i, (backend, size, spec) in enumerate(zip(backends, kernel_block_sizes, specs)):
        view = caches[f"layer{i}"]
        geometry = observe_layer(view, backend, spec, "auto", size)
        made.append(Group(geometry.key_value(storage_bytes(view)), spec, size, num_reqs, seed=i))
    return made


def run(
    backends, kernel_block_sizes=(TOKENS, TOKENS), specs=(SPEC, SPEC)
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(output, truth) of both groups, of requests of N - 1, N, N + 1 and 3N tokens that write by
    turns into pages by turns: both groups are busy, and neighbours everywhere."""
    lengths = [TOKENS - 1, TOKENS, TOKENS + 1, 3 * TOKENS]
    groups = make_groups(backends, kernel_block_sizes, len(lengths), specs)
    free = iter(range(1, NUM_PAGES))
    for row, length in enumerate(lengths):
        for start in range(0, length, TOKENS):
            for one in groups:
                if start % one.spec.block_size == 0:
                    one.table.append(row, [next(free)], overwrite=False)
                one.write(row, start, min(start + TOKENS, length))
    results = []
    for one in groups:
        generator = torch.Generator().manual_seed(7)
        query = torch.randn(len(lengths), HEADS, one.spec.head_size, generator=generator)
        results.append((one.attend(query, lengths), one.truth(query, lengths)))
    return results


@pytest.mark.parametrize("kernel_block_sizes", [(8, 8), (4, 8), (8, 2)])
@pytest.mark.parametrize("backends", PAIRS, ids=lambda pair: "-".join(b.__name__ for b in pair))
def test_two_groups_over_one_allocation(backends, kernel_block_sizes):
    """Each pair of layouts, each group with kernel blocks of its own: as if it were alone."""
    for out, truth in run(backends, kernel_block_sizes):
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel_block_sizes", [(8, 8, 8), (4, 8, 2)])
@pytest.mark.parametrize("cross", [BlocksFirst, BlocksFirstHND, Fused, FusedNHD])
@pytest.mark.parametrize("full, sliding", PAIRS, ids=lambda one: one.__name__)
def test_cross_attention_beside_two_others(full, sliding, cross, kernel_block_sizes):
    """Three groups over one allocation: full and sliding attention, and cross-attention, whose pages
    are written once, as many as the encoder's tokens fill, and read by more tokens than it has."""
    lengths, encoder_lengths = [TOKENS - 1, 3 * TOKENS, 5], [2 * TOKENS + 1, 1, TOKENS]
    groups = make_groups((full, sliding, cross), kernel_block_sizes, 3, (SPEC, SPEC, SPEC))
    free = iter(range(1, 2 * NUM_PAGES))
    for row, (length, encoder_length) in enumerate(zip(lengths, encoder_lengths)):
        own, encoder = groups[:2], groups[2]
        pages = [next(free) for _ in range(-(-encoder_length // TOKENS))]
        encoder.table.append(row, pages, overwrite=True)
        for start in range(0, length, TOKENS):
            for one in own:
                one.table.append(row, [next(free)], overwrite=False)
                one.write(row, start, min(start + TOKENS, length))
        encoder.write(row, 0, encoder_length)
    generator = torch.Generator().manual_seed(7)
    for one, seen in zip(groups, (lengths, lengths, encoder_lengths)):
        is_cross = one is groups[2]
        query = torch.randn(3, HEADS, HEAD_SIZE, generator=generator)
        truth = one.truth(query, seen)
        if is_cross:
            query, truth = (x.repeat_interleave(4, dim=0) for x in (query, truth))
        out = one.attend(query, seen, is_cross)
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel_block_sizes", [(8, 16), (4, 8)])
@pytest.mark.parametrize(
    "backends", [*PAIRS, *(pair[::-1] for pair in PAIRS)],
    ids=lambda pair: "-".join(b.__name__ for b in pair),
)  # fmt: skip
def test_padded_pages_share_an_allocation(backends, kernel_block_sizes):
    """Heads of 16 and 10 elements: no page is a multiple of the other, so the smaller gets twice the
    tokens and the larger is padded. Each layout reads its own bytes only."""
    sizes = {"a": 16, "b": 10}
    unified = unify_kv_cache_spec_page_size(
        {n: full_spec(block_size=8, num_kv_heads=2, head_size=d) for n, d in sizes.items()}
    )
    a, b = unified["a"], unified["b"]
    assert (a.block_size, b.block_size) == (8, 16) and a.page_size_bytes == b.page_size_bytes
    assert a.page_size_bytes > a.real_page_size_bytes
    for out, truth in run(backends, kernel_block_sizes, (a, b)):
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("other", [BlocksFirst, BlocksFirstHND, Fused, FusedNHD])
def test_without_alignment_text_is_garbage(other, monkeypatch):
    """What alignment is for; if this came out right, the tests above would prove nothing."""
    monkeypatch.setattr(attn_utils, "_align_mixed_attention_kv_cache_views", lambda *args: None)
    wrong = [not torch.allclose(out, truth, atol=1e-3) for out, truth in run((KVFirst, other))]
    assert any(wrong)


@pytest.mark.parametrize("order", [(1, 0, 3, 2, 4), (1, 2, 0, 3, 4)])
def test_cross_layer_pool(order):
    """Writers and readers of a pool of two layers honour that blocks lie two pages apart."""
    roles, shape = ("layer", "block", "head", "token", "content"), (2, NUM_PAGES, HEADS, TOKENS, 8)
    fields = fused_fields(HEAD_SIZE, "float32")
    pool = KVCacheGeometry.plan(roles, shape, order, "float32", NUM_PAGES, fields=fields)
    raw = torch.full((pool.end,), 0x7F, dtype=torch.int8)
    layers = [Group(pool.layer(i).key_value(raw), SPEC, TOKENS, 1, seed=i) for i in (0, 1)]
    for layer in layers:
        layer.table.append(0, [2, 1, 3], overwrite=True)
    for layer in layers:
        layer.write(0, 0, 3 * TOKENS)
    query = torch.randn(1, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(7))
    for layer in layers:
        out, truth = layer.attend(query, [3 * TOKENS]), layer.truth(query, [3 * TOKENS])
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)

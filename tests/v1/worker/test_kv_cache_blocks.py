# SPDX-License-Identifier: Apache-2.0
"""Zeroing and copying pages on every layout: those pages, whole, and no other byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.worker.kv_cache_fakes import (
    BlocksFirst,
    BlocksFirstHND,
    Fused,
    FusedNHD,
    KVFirst,
    State,
    full_spec,
    group,
    shared_config,
    state_spec,
)
from vllm.v1.attention.kv_cache_plan import observe_layer
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.utils import KVBlockZeroer, copy_kv_cache_blocks_inplace

CPU = torch.device("cpu")
NB = 5
BACKENDS = [KVFirst, BlocksFirst, BlocksFirstHND, Fused, FusedNHD]
PAIRS = [(KVFirst,), (Fused,), (KVFirst, BlocksFirst), (KVFirst, Fused), (FusedNHD, BlocksFirstHND)]


def make(backends, kernel_block_size=16, **kwargs):
    """Groups and their caches over one allocation, every element 1."""
    spec = full_spec(num_kv_heads=2, **kwargs)
    groups = [group(b, spec, f"layer{i}", group_id=i) for i, b in enumerate(backends)]
    raw = torch.ones(NB * spec.page_size_bytes, dtype=torch.int8)
    raws = {f"layer{i}": raw for i in range(len(groups))}
    sizes = [kernel_block_size] * len(groups)
    caches = _reshape_kv_cache(groups, raws, "auto", sizes, {}, shared_config(NB, groups))
    for cache in caches.values():
        cache.fill_(1)
    return groups, caches, sizes, raw


def zeroer(groups, caches, sizes, **kwargs):
    context = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    return KVBlockZeroer(CPU, groups, sizes, "auto", context, **kwargs)


def geometries(groups, caches, sizes):
    return [
        observe_layer(caches[name], one.backend, one.kv_cache_spec, "auto", sizes[0])
        for one in groups
        for name in one.layer_names
    ]


def zero_pages(backend, cache) -> list[int]:
    """Pages all of whose elements are 0, if all others have none."""
    pages = cache.movedim(1 if backend is KVFirst else 0, 0).reshape(NB, -1)
    counts = pages.count_nonzero(1).tolist()
    assert set(counts) <= {0, pages.shape[1]}
    return [page for page, count in enumerate(counts) if count == 0]


@pytest.mark.parametrize("kernel_block_size", [16, 4])
@pytest.mark.parametrize("kwargs", [{}, {"dtype": torch.float8_e4m3fn}, {"page_size_padded": 1280}])
@pytest.mark.parametrize("backends", PAIRS)
def test_zeroing(backends, kwargs, kernel_block_size):
    """Both halves of a K/V-first page; kernel blocks, padding and mixes; any dtype."""
    groups, caches, sizes, _ = make(backends, kernel_block_size, **kwargs)
    zeroer(groups, caches, sizes).zero_block_ids([1, 3])
    for one in groups:
        assert zero_pages(one.backend, caches[one.layer_names[0]].float()) == [1, 3]


def test_zeroing_leaves_padding_and_others_alone():
    """Bytes between pages may be somebody else's."""
    groups, caches, sizes, raw = make((BlocksFirst,), page_size_padded=1280)
    before = raw.view(NB, 1280)[:, 1024:].clone()
    zeroer(groups, caches, sizes).zero_block_ids(list(range(NB)))
    assert torch.equal(raw.view(NB, 1280)[:, 1024:], before) and before.any()
    assert raw.view(NB, 1280)[:, :1024].count_nonzero() == 0


def test_layers_without_attention_caches_are_left_out():
    spec, state = full_spec(), state_spec()
    caches = {"a": torch.ones(NB, 1, 16, 8)}
    groups = [group(Fused, spec, "a", "b"), group(State, state, "m", group_id=1)]
    one = zeroer(groups, caches, [16, 16], runner_only_attn_layers={"b"})
    one.zero_block_ids([])
    assert caches["a"].all()
    one.warmup(NB)
    assert zero_pages(Fused, caches["a"]) == [0]


def test_page_out_of_range_is_refused():
    """On a GPU it would kill the process, or write into another allocation."""
    groups, caches, sizes, _ = make((KVFirst,))
    for page in (NB, -1):
        with pytest.raises(IndexError, match=f"page {page} of a KV cache of {NB}"):
            zeroer(groups, caches, sizes).zero_block_ids([page])


@given(
    st.sampled_from(PAIRS),
    st.sampled_from([16, 4]),
    st.permutations(range(NB)),
    st.lists(st.integers(0, NB - 1), max_size=NB),
)
def test_copying(backends, kernel_block_size, destinations, sources):
    """Any copies at once, chains and swaps too: as if all sources were read first. Layers that
    share an allocation would do a chain twice, and end with other bytes."""
    groups, caches, sizes, raw = make(backends, kernel_block_size)
    raw.copy_(torch.randint(0, 100, raw.shape, dtype=torch.int8))
    expected = {}
    copies = [KVCacheBlockCopy(s, d) for s, d in zip(sources, destinations)]
    for one in groups:
        name, block_dim = one.layer_names[0], 1 if one.backend is KVFirst else 0
        pages = caches[name].clone().unflatten(block_dim, (NB, -1)).movedim(block_dim, 0)
        held = pages.clone()
        for copy in copies:
            pages[copy.dst_block_id] = held[copy.src_block_id]
        expected[name] = pages.movedim(0, block_dim).flatten(block_dim, block_dim + 1)
    known = geometries(groups, caches, sizes)
    copy_kv_cache_blocks_inplace(list(caches.values()), NB, copies, known)
    for name, cache in caches.items():
        assert cache.view(torch.int32).equal(expected[name].view(torch.int32))


def test_copying_without_geometries():
    """Where one dimension alone can be the blocks; a list of caches is one layer's states."""
    first, blocks, state = torch.zeros(2, 7, 16, 1, 4), torch.zeros(14, 2, 16), torch.zeros(7, 3)
    first[:, 1], blocks[2:4], state[1] = 1, 1, 1
    copy_kv_cache_blocks_inplace([first, [blocks, state]], 7, [KVCacheBlockCopy(1, 4)])
    assert first.sum() == 2 * 2 * 64 and first[:, 4].all()
    assert blocks.sum() == 2 * 2 * 32 and blocks[8:10].all()
    assert state.sum() == 2 * 3 and state[4].all()


def test_copying_does_not_guess():
    """Two pages of a K/V-first cache: K would be copied over V."""
    cache = torch.zeros(2, 2, 16, 1, 4)
    with pytest.raises(ValueError, match=r"no telling which dimension .*\(2, 2, 16, 1, 4\)"):
        copy_kv_cache_blocks_inplace([cache], 2, [KVCacheBlockCopy(0, 1)])
    copy_kv_cache_blocks_inplace([cache], 2, [])


def test_two_copies_into_one_page_are_refused():
    copies = [KVCacheBlockCopy(0, 2), KVCacheBlockCopy(1, 2)]
    with pytest.raises(ValueError, match="destination of two copies"):
        copy_kv_cache_blocks_inplace([torch.zeros(7, 3)], 7, copies)

# SPDX-License-Identifier: Apache-2.0
"""Registration accepts each cache whose pages lie where they should and refuses every other one,
however many kernel blocks make a page.

The fault guarded against: `cache.shape[0] == num_blocks` refuses right caches where kernel blocks
are smaller than pages; without any check a wrong cache passes and foreign bytes are sent.
"""

from __future__ import annotations

import re

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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.registration import plan_registration
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache

NB, BS, H, D = 6, 16, 2, 4
LAYOUTS = [KVFirst, BlocksFirst, BlocksFirstHND, Fused, FusedNHD]
RATIOS = [1, 2, 4]


class TokensFirst:
    """(NB, BS, H, C): fused, token by token, as it is."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, block_size, num_kv_heads, 2 * head_size)


def dense(backend, num_blocks, block_size, heads=H, head_size=D, dtype=torch.float32):
    """A cache as the backend would have it by itself."""
    shape = backend.get_kv_cache_shape(num_blocks, block_size, heads, head_size)
    order = getattr(backend, "get_kv_cache_stride_order", lambda: tuple(range(len(shape))))()
    cache = torch.zeros([shape[d] for d in order], dtype=dtype)
    return cache.permute([order.index(d) for d in range(len(shape))])


def config_of(spec, num_blocks=NB, names=("a",), size=None):
    size = size or num_blocks * spec.page_size_bytes
    return KVCacheConfig(
        num_blocks,
        [KVCacheTensor(size, [name]) for name in names],
        [KVCacheGroupSpec(list(names), spec)],
    )


def spec_of(**kwargs):
    return full_spec(**{"block_size": BS, "num_kv_heads": H, "head_size": D} | kwargs)


def register(cache, backend, spec=None, num_blocks=NB):
    return plan_registration({"a": cache}, config_of(spec or spec_of(), num_blocks), {"a": backend})


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("r", RATIOS)
@pytest.mark.parametrize("more", [0, 1])
def test_a_cache_with_enough_pages_passes(backend, r, more):
    """(NB, BS) and (NB * r, BS / r), and one page more than is used. What a page owns are the bytes
    of its tokens, found by writing to them."""
    cache = dense(backend, (NB + more) * r, BS // r)
    plan = register(cache, backend)
    assert plan.kernel_blocks_per_page == (r,)
    [region] = plan.regions
    for page in (0, NB - 1):
        cache.zero_()
        block_dim = 1 if backend is KVFirst else 0
        cache.narrow(block_dim, page * r, r).fill_(1.0)
        owned = {a for start, n in plan.page_runs(0, page) for a in range(start, start + n)}
        flat = torch.empty(0, dtype=torch.float32).set_(cache.untyped_storage())
        touched = flat.nonzero().flatten().tolist()
        address = cache.untyped_storage().data_ptr()
        assert owned == {address + 4 * i + byte for i in touched for byte in range(4)}
        assert all(region.address <= a < region.end for a in owned)
    with pytest.raises(IndexError):
        plan.page_runs(0, NB)


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("r", RATIOS)
def test_fewer_pages_are_refused(backend, r):
    """One kernel block too few is too few."""
    with pytest.raises(ValueError, match="too few"):
        register(dense(backend, NB * r - 1, BS // r), backend)


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("r", RATIOS)
def test_the_refusal_names_everything(backend, r):
    """What its reader needs: layer, blocks, shape, stride, spec, backends, layout."""
    cache = dense(backend, 1, BS // r)
    with pytest.raises(ValueError) as refused:
        register(cache, backend)
    message = str(refused.value)
    for part in (
        "layer a",
        f"Expected {NB} blocks",
        str(tuple(cache.shape)),
        str(tuple(cache.stride())),
        "FullAttentionSpec",
        f"backend {backend.__name__}",
        f"all: {backend.__name__}",
        "layout (",
    ):
        assert part in message


@pytest.mark.parametrize("r", RATIOS)
def test_foreign_bytes_are_refused(r):
    """Pages that step over the end of the allocation into the next one in the same memory."""
    spec = spec_of()
    page = spec.page_size_bytes // 4
    memory = torch.zeros(2 * NB * page)
    half = memory[: NB * page].view(BlocksFirst.get_kv_cache_shape(NB * r, BS // r, H, D))
    rest = memory[NB * page :].view(half.shape)
    config = config_of(spec, names=("a", "b"))
    backends = {"a": BlocksFirst, "b": BlocksFirst}
    plan = plan_registration({"a": half, "b": rest}, config, backends)
    assert [region.nbytes for region in plan.regions] == [NB * page * 4] * 2
    stretched = memory.as_strided(half.shape, (2 * half.stride(0), *half.stride()[1:]))
    with pytest.raises(ValueError, match="bytes from the start of an allocation of"):
        plan_registration({"a": stretched, "b": rest}, config, backends)
    with pytest.raises(ValueError, match="reaches into that of"):
        plan_registration({"a": half, "b": half}, config, backends)


@pytest.mark.parametrize("r", RATIOS)
def test_a_layer_outside_its_shared_allocation_is_refused(r):
    spec = spec_of()
    groups = [group(Fused, spec, name, group_id=i) for i, name in enumerate("ab")]
    caches = {name: dense(Fused, NB * r, BS // r) for name in "ab"}
    with pytest.raises(ValueError, match="outside the allocation"):
        plan_registration(caches, shared_config(NB, groups), {"a": Fused, "b": Fused})


@pytest.mark.parametrize("r", RATIOS)
def test_views_that_collide_are_refused(r):
    """Blocks-first beside K/V-first over one allocation, not aligned: page 1 of one is part of
    another page of the other, though every byte lies inside."""
    spec = spec_of()
    raw = torch.zeros(NB * spec.page_size_bytes // 4)
    caches = {
        name: raw.view(backend.get_kv_cache_shape(NB * r, BS // r, H, D))
        for name, backend in (("a", KVFirst), ("b", BlocksFirst))
    }
    groups = [group(None, spec, name, group_id=i) for i, name in enumerate("ab")]
    config = shared_config(NB, groups)
    with pytest.raises(ValueError, match="share bytes"):
        plan_registration(caches, config, {"a": KVFirst, "b": BlocksFirst})


@pytest.mark.parametrize("other", [BlocksFirst, BlocksFirstHND, Fused, FusedNHD])
@pytest.mark.parametrize("r", RATIOS)
def test_a_mixed_aligned_allocation_is_registered_once(other, r):
    """K/V-first self-attention, cross-attention on another layout: the same runs for both, two a
    page where both are K/V-first, one where the K/V-first view was laid page by page."""
    spec = spec_of()
    groups = [group(KVFirst, spec, "self", group_id=0), group(other, spec, "cross", group_id=1)]
    config = shared_config(NB, groups)
    raw = torch.zeros(NB * spec.page_size_bytes, dtype=torch.int8)
    raws = {"self": raw, "cross": raw}
    caches = _reshape_kv_cache(groups, raws, "auto", [BS // r, BS // r], {}, config)
    plan = plan_registration(caches, config, {"self": KVFirst, "cross": other})
    assert [(one.address, one.nbytes) for one in plan.regions] == [(raw.data_ptr(), raw.numel())]
    aligned_kv_first = other in (BlocksFirst, BlocksFirstHND)
    for page in range(NB):
        runs = plan.page_runs(0, page)
        assert runs == plan.page_runs(1, page)
        assert len(runs) == (2 if aligned_kv_first else 1)
        assert sum(n for _, n in runs) == spec.page_size_bytes


def test_packed_blocks_are_one_run():
    """Two layers that interleave: a page is the whole block of `block_stride` bytes."""
    spec = spec_of()
    page = spec.page_size_bytes
    config = KVCacheConfig(
        NB,
        [
            KVCacheTensor(page, ["a"], offset=0, block_stride=2 * page),
            KVCacheTensor(page, ["b"], offset=page, block_stride=2 * page),
        ],
        [KVCacheGroupSpec(["a", "b"], spec)],
    )
    raw = torch.zeros(2 * NB * page, dtype=torch.int8)
    attn_groups = [group(Fused, spec, "a", "b")]
    caches = _reshape_kv_cache(attn_groups, {"a": raw, "b": raw}, "auto", [BS], {}, config)
    plan = plan_registration(caches, config, {"a": Fused, "b": Fused})
    assert [(one.address, one.nbytes) for one in plan.regions] == [(raw.data_ptr(), raw.numel())]
    for page_id in range(NB):
        assert plan.page_runs(0, page_id) == [(raw.data_ptr() + 2 * page * page_id, 2 * page)]


def test_a_layer_that_reads_anothers_cache_is_no_second_one():
    spec = spec_of()
    cache = dense(Fused, NB, BS)
    config = KVCacheConfig(
        NB,
        [KVCacheTensor(NB * spec.page_size_bytes, ["a", "b"])],
        [KVCacheGroupSpec(["a", "b"], spec)],
    )
    plan = plan_registration({"a": cache, "b": cache}, config, {"a": Fused, "b": Fused})
    assert plan.layers["b"].alias_of == "a"
    assert sum(n for _, n in plan.page_runs(0, 3)) == spec.page_size_bytes


def test_the_reported_case():
    """Page 128, kernel 64, cache (3636, 64, 8, 128) as (NB * r, BS, H, C): 1818 pages of two kernel
    blocks. `shape[0] == num_blocks` refused it."""
    spec = spec_of(block_size=128, num_kv_heads=8, head_size=64, dtype=torch.int8)
    cache = torch.empty(3636, 64, 8, 128, dtype=torch.int8)
    plan = register(cache, TokensFirst, spec, num_blocks=1818)
    assert plan.common_kernel_blocks_per_page == 2
    page = 128 * 8 * 128
    assert plan.page_runs(0, 1817) == [(cache.data_ptr() + 1817 * page, page)]
    with pytest.raises(ValueError, match=re.escape("(3636, 64, 8, 128)")):
        register(cache, TokensFirst, spec, num_blocks=1819)


def test_groups_have_ratios_of_their_own():
    """The smallest page has 4 tokens while another group's kernel wants 256; pages are equally
    large in bytes, so one has 64 times the heads. Full attention r = 1, sliding window r = 4."""
    small = spec_of(block_size=4, num_kv_heads=64)
    large = spec_of(block_size=256, num_kv_heads=1)
    split = spec_of(block_size=16, num_kv_heads=16)
    specs = {"small": small, "large": large, "split": split}
    groups = [group(FusedNHD, spec, name, group_id=i) for i, (name, spec) in enumerate(specs.items())]
    config = shared_config(NB, groups)
    raw = torch.zeros(NB * small.page_size_bytes, dtype=torch.int8)
    raws = dict.fromkeys(specs, raw)
    caches = _reshape_kv_cache(groups, raws, "auto", [4, 256, 4], {}, config)
    plan = plan_registration(caches, config, dict.fromkeys(specs, FusedNHD))
    assert plan.kernel_blocks_per_page == (1, 1, 4)
    assert plan.common_kernel_blocks_per_page == 1
    for page in range(NB):
        assert plan.page_runs(0, page) == plan.page_runs(1, page) == plan.page_runs(2, page)


@pytest.mark.parametrize("num_blocks", [111680, 111488])
def test_many_pages(num_blocks):
    """Found in time that does not depend on the number of pages, exact to the last one."""
    spec = full_spec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.int8)
    cache = torch.empty(2, num_blocks * 4, 4, 1, 8, dtype=torch.int8)
    plan = register(cache, KVFirst, spec, num_blocks)
    half = 16 * 8
    last = num_blocks - 1
    assert plan.page_runs(0, last) == [
        (cache.data_ptr() + last * half, half),
        (cache.data_ptr() + (num_blocks + last) * half, half),
    ]

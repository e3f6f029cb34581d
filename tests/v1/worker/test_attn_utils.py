# SPDX-License-Identifier: Apache-2.0
"""Allocation and views of the runner's caches, one layer an allocation or without a config."""

from __future__ import annotations

import pytest
import torch

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
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.kv_cache_plan import observe_layer
from vllm.v1.kv_cache_geometry import KVCacheConflict
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    get_kv_quant_mode,
)
from vllm.v1.worker.gpu.attn_utils import (
    _allocate_kv_cache,
    _reshape_attention_kv_cache,
    _reshape_kv_cache,
    init_kv_cache,
)
from vllm.v1.worker.kv_cache_layout import observe_allocations, plan_allocations

CPU = torch.device("cpu")
NB = 4


def raw_of(spec, num_pages=NB) -> torch.Tensor:
    return torch.zeros(num_pages * spec.page_size_bytes, dtype=torch.int8)


def reshape(backend, spec, kernel_block_size=None, cache_dtype="auto") -> torch.Tensor:
    raw = raw_of(spec)
    sizes = [kernel_block_size or spec.block_size]
    caches = _reshape_kv_cache([group(backend, spec, "a")], {"a": raw}, cache_dtype, sizes, {})
    assert caches["a"].untyped_storage().data_ptr() == raw.data_ptr()
    return caches["a"]


@pytest.mark.parametrize(
    ("backend", "shape", "strides"),
    [
        (KVFirst, (2, 4, 16, 3, 4), (768, 192, 12, 4, 1)),
        (BlocksFirst, (4, 2, 16, 3, 4), (384, 192, 12, 4, 1)),
        (BlocksFirstHND, (4, 2, 16, 3, 4), (384, 192, 4, 64, 1)),
        (Fused, (4, 3, 16, 8), (384, 128, 8, 1)),
        (FusedNHD, (4, 3, 16, 8), (384, 8, 24, 1)),
        (CPUAttentionBackend, (4, 3, 16, 8), (384, 128, 8, 1)),
    ],
)
def test_natural_views(backend, shape, strides):
    """Logical shape and element strides as the backend declares them; 3 heads of 4."""
    cache = reshape(backend, full_spec(num_kv_heads=3))
    assert cache.shape == shape and cache.stride() == strides


def test_kernel_blocks():
    """Pages of 32 tokens for kernels of 16: twice the rows, the same bytes."""
    cache = reshape(BlocksFirst, full_spec(block_size=32), kernel_block_size=16)
    assert cache.shape == (8, 2, 16, 1, 4) and cache.stride() == (128, 64, 4, 4, 1)


@pytest.mark.parametrize(
    ("backend", "strides"),
    [
        (BlocksFirst, (160, 64, 4, 4, 1)),
        (BlocksFirstHND, (160, 64, 4, 64, 1)),
        (Fused, (160, 128, 8, 1)),
        (KVFirst, (64, 160, 4, 4, 1)),
    ],
)
def test_padded_pages(backend, strides):
    """Blocks stride by the padded page, K and V stay half the unpadded page apart; K/V-first
    halves would leave the padding of all pages at the end, where no page has it."""
    cache = reshape(backend, full_spec(page_size_padded=640))
    assert cache.stride() == strides


def test_two_heads_and_two_blocks_are_told_apart():
    """(2, 2, 2, 2, 2): every dimension could be every other."""
    spec = full_spec(block_size=2, num_kv_heads=2, head_size=2)
    caches = [
        _reshape_kv_cache([group(one, spec, "a")], {"a": raw_of(spec, 2)}, "auto", [2], {})["a"]
        for one in (KVFirst, BlocksFirst, BlocksFirstHND)
    ]
    assert [cache.stride() for cache in caches] == [
        (16, 8, 4, 2, 1),
        (16, 8, 4, 2, 1),
        (16, 8, 2, 4, 1),
    ]
    padded = full_spec(block_size=2, num_kv_heads=2, head_size=2, page_size_padded=80)
    raw = raw_of(padded, 2)
    caches = [
        _reshape_kv_cache([group(one, padded, "a")], {"a": raw}, "auto", [2], {})["a"]
        for one in (KVFirst, BlocksFirst)
    ]
    assert [cache.stride()[:2] for cache in caches] == [(8, 20), (20, 8)]


def test_recurrent_layers_get_byte_pages():
    spec = state_spec()
    raw = raw_of(spec)
    caches = _reshape_kv_cache([group(State, spec, "m")], {"m": raw}, "auto", [16], {})
    assert caches["m"].shape == (NB, 1, 1, 512) and caches["m"].dtype == torch.int8


def test_latent_cache():
    """MLA: one latent a token instead of K and V, no dimension of heads."""

    class Latent:
        @staticmethod
        def get_kv_cache_shape(nb, bs, heads, head_size, cache_dtype_str="auto"):
            return (nb, bs, head_size)

    spec = full_spec(head_size=6, head_size_v=0)
    cache = reshape(Latent, spec)
    assert cache.shape == (NB, 16, 6) and spec.page_size_bytes == 16 * 6 * 4
    geometry = observe_layer(cache, Latent, spec, "auto", 16)
    assert [part.name for part in geometry.parts] == ["latent"]


def test_attention_beside_a_recurrent_layer():
    """Shared with states K/V-first goes page by page, its shape unchanged, config or not; alone it
    keeps its halves."""
    spec = full_spec()
    groups = [group(KVFirst, spec, "a", "alone"), group(State, state_spec(), "m", group_id=1)]
    raw = raw_of(spec)
    raws = {"a": raw, "m": raw, "alone": raw_of(spec)}
    caches = _reshape_kv_cache(groups, raws, "auto", [16, 16], {})
    assert caches["a"].shape == (2, NB, 16, 1, 4)
    assert caches["a"].stride() == (64, 128, 4, 4, 1)
    assert caches["alone"].stride() == (256, 64, 4, 4, 1)
    caches["m"][1] = 1
    assert caches["a"][:, 1].count_nonzero() == 128
    assert caches["a"].count_nonzero() == 128


def test_readers_get_their_targets_cache():
    spec = full_spec()
    groups = [group(Fused, spec, "a", "b")]
    caches = _reshape_kv_cache(groups, {"a": raw_of(spec)}, "auto", [16], {"b": "a"})
    assert caches["b"] is caches["a"]


def test_reader_with_another_layout_is_refused():
    """It would take the first page for all keys."""
    spec = full_spec()
    groups = [group(BlocksFirst, spec, "a"), group(KVFirst, spec, "b")]
    with pytest.raises(ValueError, match=r"layer b \(KVFirst\) reads the KV cache of a"):
        _reshape_kv_cache(groups, {"a": raw_of(spec)}, "auto", [16], {"b": "a"})


def test_scales_inside_the_page():
    """int8_per_token_head: 520 bytes a token and head of 256, 1032 of 512; a float32 scale each for
    K and V."""

    class Quantised(Fused):
        @staticmethod
        def get_kv_cache_shape(nb, bs, heads, head_size, cache_dtype_str="auto"):
            extra = 4 if cache_dtype_str == "int8_per_token_head" else 0
            return (nb, heads, bs, 2 * (head_size + extra))

    mode = get_kv_quant_mode("int8_per_token_head")
    assert mode is KVQuantMode.INT8_PER_TOKEN_HEAD and mode.is_per_token_head
    for head_size, per_token in ((256, 520), (512, 1032)):
        spec = full_spec(head_size=head_size, dtype=torch.int8, kv_quant_mode=mode)
        assert spec.page_size_bytes == 16 * per_token
        cache = reshape(Quantised, spec, cache_dtype="int8_per_token_head")
        assert cache.shape == (NB, 1, 16, per_token)


def test_backend_that_cannot_skip_padding_is_refused():
    """Its kernels would compute page 1's address from the shape, and read the padding."""

    class Rigid(BlocksFirst):
        @classmethod
        def reads_kv_cache_strides(cls):
            return False

    assert reshape(Rigid, full_spec()).is_contiguous()
    with pytest.raises(ValueError, match="Rigid does not read the strides.*--attention-backend"):
        reshape(Rigid, full_spec(page_size_padded=640))


def test_partial_page_is_refused():
    """An allocation that is no whole number of pages was planned with other numbers."""
    raws = {"a": torch.zeros(1000, dtype=torch.int8)}
    with pytest.raises(ValueError, match="KV cache of layer a: 512 does not divide 1000"):
        _reshape_kv_cache([group(Fused, full_spec(), "a")], raws, "auto", [16], {})


def test_reshape_by_shape_alone():
    """Told no roles, the helper takes the only dimension that can be the blocks, or refuses."""
    spec, raw = full_spec(), raw_of(full_spec())
    with pytest.raises(ValueError, match=r"dimension of \(2, 4, 16, 1, 4\) is 4 blocks"):
        _reshape_attention_kv_cache(raw, spec, (2, 4, 16, 1, 4), (0, 1, 2, 3, 4), 4, None)
    wide = full_spec(head_size=8)
    shape = (2, 4, 16, 1, 8)
    natural = _reshape_attention_kv_cache(raw_of(wide), wide, shape, (0, 1, 2, 3, 4), 4, None)
    assert natural.is_contiguous()
    paged = _reshape_attention_kv_cache(raw_of(wide), wide, shape, (0, 1, 2, 3, 4), 4, None, True)
    assert paged.stride() == (128, 256, 8, 8, 1)


def packed_config(spec, offsets, block_stride) -> KVCacheConfig:
    names = [f"layer{i}" for i in range(len(offsets))]
    tensors = [
        KVCacheTensor(spec.page_size_bytes * NB, [name], offset, block_stride)
        for name, offset in zip(names, offsets)
    ]
    return KVCacheConfig(NB, tensors, [KVCacheGroupSpec(names, spec)])


def init(config, groups, kernel_block_sizes, context=None):
    class Layer:
        def bind_kv_cache(self, kv_cache):
            self.kv_cache = kv_cache

    names = [name for one in groups for name in one.layer_names]
    context = {name: Layer() for name in names} if context is None else context
    bound: list[torch.Tensor] = []
    by_id = [[one for one in groups if one.kv_cache_group_id == i] for i in range(len(groups))]
    caches = init_kv_cache(
        bound, context, config, by_id, CPU, "auto", kernel_block_sizes, vllm_config=None
    )
    assert all(context[name].kv_cache is caches[name] for name in names)
    seen = observe_allocations(groups, caches, "auto", kernel_block_sizes, {})
    planned = plan_allocations(groups, config, "auto", kernel_block_sizes)
    assert sorted(planned, key=lambda one: min(one.layers)) == sorted(
        seen, key=lambda one: min(one.layers)
    )
    return caches, bound


def test_planned_readers_lie_where_their_targets_do():
    spec = full_spec()
    groups = [group(Fused, spec, "a", "b")]
    config = shared_config(NB, [group(Fused, spec, "a")])
    (allocation,) = plan_allocations(groups, config, "auto", [16], {"b": "a"})
    allocation.check()
    assert allocation.layers["b"].alias_of == "a"
    assert allocation.layers["b"].geometry == allocation.layers["a"].geometry


def test_packed_layers_interleave():
    """Block i of layer 1 lies 512 bytes behind that of layer 0, and 1024 behind its own i - 1."""
    spec = full_spec()
    config = packed_config(spec, [0, 512], 1024)
    caches, bound = init(config, [group(BlocksFirst, spec, "layer0", "layer1")], [16])
    assert len(bound) == 2
    first, second = caches["layer0"], caches["layer1"]
    assert first.untyped_storage().nbytes() == NB * 1024
    assert second.data_ptr() - first.data_ptr() == 512
    assert first.stride() == second.stride() == (256, 64, 4, 4, 1)
    second.fill_(1)
    assert first.count_nonzero() == 0


def test_packed_layers_that_overlap_are_refused():
    """One layer's V would be the next one's K, in every page."""
    spec = full_spec()
    groups = [group(BlocksFirst, spec, "layer0", "layer1")]
    with pytest.raises(KVCacheConflict, match="layer layer0 and page 0 of layer layer1"):
        init(packed_config(spec, [0, 256], 1024), groups, [16])
    with pytest.raises(ValueError, match="layer layer1: a cache that ends at byte 4352 in 4096"):
        init(packed_config(spec, [0, 768], 1024), groups, [16])


def test_packed_pages_of_several_kernel_blocks_are_refused():
    spec = full_spec(block_size=32)
    config = packed_config(spec, [0, 1024], 2048)
    with pytest.raises(ValueError, match="2 kernel blocks cannot interleave.*--block-size"):
        init(config, [group(BlocksFirst, spec, "layer0", "layer1")], [16])


def test_start_is_refused_where_layers_of_one_group_share():
    """A grouping fault would give two layers that run in one step the same pages."""
    spec = full_spec()
    groups = [group(Fused, spec, "layer0", "layer1")]
    with pytest.raises(KVCacheConflict, match="page 0 of layer layer0"):
        init(shared_config(NB, groups), groups, [16])


def test_start_of_one_group():
    """An allocation a layer, zeroed; bound by index."""
    spec = full_spec()
    tensors = [KVCacheTensor(NB * 512, [f"layers.{i}.attn"]) for i in (1, 0)]
    names = ["layers.1.attn", "layers.0.attn"]
    config = KVCacheConfig(NB, tensors, [KVCacheGroupSpec(names, spec)])
    caches, bound = init(config, [group(Fused, spec, *names)], [16])
    assert bound[0] is caches["layers.0.attn"]
    assert all(cache.count_nonzero() == 0 for cache in bound)


def test_two_attention_modules_a_layer(monkeypatch):
    """Models with two attention modules a layer start on platforms that refuse two caches of one
    index: each module has an index of its own."""
    from vllm.v1.worker import utils

    class Refusing(type(utils.current_platform)):
        @classmethod
        def check_runner_kv_caches_multi_layer(cls):
            raise NotImplementedError("one cache an index")

    monkeypatch.setattr(utils, "current_platform", Refusing())
    spec = full_spec()
    names = [f"model.layers.{i}.self_attn.{j}.attn" for i in (1, 0) for j in (0, 1)]
    tensors = [KVCacheTensor(NB * 512, [name]) for name in names]
    config = KVCacheConfig(NB, tensors, [KVCacheGroupSpec(names, spec)])
    caches, bound = init(config, [group(Fused, spec, *names)], [16])
    assert [next(n for n in names if caches[n] is one) for one in bound] == sorted(names)


def test_allocation_is_shared_by_name():
    spec = full_spec()
    groups = [group(Fused, spec, "a"), group(Fused, spec, "b", group_id=1)]
    raw = _allocate_kv_cache(shared_config(NB, groups), {"c": "a"}, CPU)
    assert raw["a"] is raw["b"] is raw["c"]
    assert raw["a"].dtype == torch.int8 and raw["a"].numel() == NB * 512

# SPDX-License-Identifier: Apache-2.0
"""Layers of several groups in one allocation: aligned, or refused with advice; never in between."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.worker.kv_cache_fakes import (
    BlocksFirst,
    BlocksFirstHND,
    Fused,
    FusedNHD,
    Interleaved,
    KVFirst,
    State,
    full_spec,
    group,
    shared_config,
    state_spec,
)
from vllm.v1.kv_cache_geometry import KVLayoutError
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.attn_utils import (
    _align_mixed_attention_kv_cache_views,
    _reshape_kv_cache,
    _restride_blocks_first_kv_cache_to_kv_first_storage,
)
from vllm.v1.worker.kv_cache_layout import observe_allocations, plan_allocations

NB = 4
BACKENDS = [KVFirst, BlocksFirst, BlocksFirstHND, Interleaved, Fused, FusedNHD, State]


def rigid(backend):
    """The same backend with kernels that take the cache for contiguous."""

    class Rigid(backend):
        @classmethod
        def reads_kv_cache_strides(cls):
            return False

    Rigid.__qualname__ = f"Rigid{backend.__name__}"
    return Rigid


def spec_for(backend, **kwargs):
    spec = full_spec(**kwargs)
    return state_spec(spec.page_size_bytes) if backend is State else spec


def mix(*backends, kernel_block_sizes=None, num_blocks=NB, specs=None, **kwargs):
    """Views of layers `layer0`, ... of a group each, in one allocation; what is planned without a
    tensor is what they are."""
    specs = specs or [spec_for(backend, **kwargs) for backend in backends]
    groups = [
        group(backend, spec, f"layer{i}", group_id=i)
        for i, (backend, spec) in enumerate(zip(backends, specs))
    ]
    config = shared_config(num_blocks, groups)
    raw = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    raws = {f"layer{i}": raw for i in range(len(groups))}
    sizes = kernel_block_sizes or [spec.block_size for spec in specs]
    caches = _reshape_kv_cache(groups, raws, "auto", sizes, {}, config)
    allocations = observe_allocations(groups, caches, "auto", sizes, {})
    assert plan_allocations(groups, config, "auto", sizes) == allocations
    allocations[0].check()
    return [caches[f"layer{i}"] for i in range(len(groups))]


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("backends", list(itertools.permutations([KVFirst, BlocksFirst])))
def test_blocks_first_beside_kv_first(backends, heads):
    """The mainline case: storage stays K/V-first, in either order of groups."""
    views = dict(zip(backends, mix(*backends, num_kv_heads=heads)))
    half = 16 * heads * 4
    assert views[KVFirst].is_contiguous()
    assert views[BlocksFirst].shape == (NB, 2, 16, heads, 4)
    assert views[BlocksFirst].stride() == (half, NB * half, heads * 4, 4, 1)
    assert views[BlocksFirst].data_ptr() == views[KVFirst].data_ptr()
    views[BlocksFirst][1] = 1
    assert views[KVFirst][:, 1].eq(1).all() and views[KVFirst].sum() == 2 * half


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_hnd_is_aligned_too(heads):
    """It was skipped with a warning, and corrupted text."""
    first, blocks = mix(KVFirst, BlocksFirstHND, num_kv_heads=heads)
    half = 16 * heads * 4
    assert first.is_contiguous()
    assert blocks.stride() == (half, NB * half, 4, 64, 1)


def test_interleaved_tail_is_laid_anew():
    first, blocks = mix(KVFirst, Interleaved, num_kv_heads=2)
    assert first.is_contiguous()
    assert blocks.stride()[:2] == (128, NB * 128)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("other", [Fused, FusedNHD, State])
def test_kv_first_goes_page_by_page(other, heads):
    """Beside what cannot be split into halves. Two heads made a fused cache `(6, 2, 16, 32)` look
    like K and V: it died on an assertion, or was given strides that mixed its heads."""
    first, unmoved = mix(KVFirst, other, num_kv_heads=heads)
    alone = mix(other, num_kv_heads=heads)[0]
    half = 16 * heads * 4
    assert first.shape == (2, NB, 16, heads, 4)
    assert first.stride() == (half, 2 * half, heads * 4, 4, 1)
    assert unmoved.shape == alone.shape and unmoved.stride() == alone.stride()


def test_kv_first_beside_padded_pages():
    """The padded page is as large as the K/V-first one, and only page by page can they agree."""
    specs = [full_spec(head_size=5), full_spec(page_size_padded=640)]
    first, padded = mix(KVFirst, BlocksFirst, specs=specs)
    assert first.stride() == (80, 160, 5, 5, 1)
    assert padded.stride() == (160, 64, 4, 4, 1)


def test_three_groups():
    """One fused cache settles it for all: the blocks-first view stays, K/V-first moves."""
    first, blocks, fused = mix(KVFirst, BlocksFirst, Fused)
    assert first.stride() == (64, 128, 4, 4, 1)
    assert blocks.is_contiguous() and fused.is_contiguous()


@pytest.mark.parametrize("backends", [(KVFirst, KVFirst), (BlocksFirst, Fused, State), (Fused,)])
def test_without_a_mix_nothing_changes(backends):
    """Storage of those who are alone, or agree, is what their kernels are fastest on."""
    assert all(view.is_contiguous() for view in mix(*backends))


def test_groups_with_kernel_blocks_of_their_own():
    """Pages of 64 tokens: K/V-first in one block, blocks-first in four."""
    first, blocks = mix(KVFirst, BlocksFirst, block_size=64, kernel_block_sizes=[64, 16])
    assert blocks.shape == (4 * NB, 2, 16, 1, 4)
    assert blocks.stride() == (64, 4 * NB * 64, 4, 4, 1)
    blocks[4:8] = 1
    assert first[:, 1].eq(1).all() and first.count_nonzero() == 2 * 64 * 4
    first, fused = mix(KVFirst, Fused, block_size=64, kernel_block_sizes=[16, 64])
    fused[1] = 1
    assert first[:, 4:8].eq(1).all() and first.count_nonzero() == 2 * 64 * 4


@pytest.mark.parametrize("tokens", [528, 784])
def test_pages_of_hybrid_models(tokens):
    """Page sizes that are no powers of two, cut into kernel blocks of 16, beside states."""
    first, state = mix(KVFirst, State, block_size=tokens, kernel_block_sizes=[16, tokens])
    first.narrow(1, tokens // 16, tokens // 16).fill_(1)
    assert state[1].count_nonzero() > 0 and state[[0, 2, 3]].count_nonzero() == 0


def test_one_page():
    """Nothing can collide, so nothing moves; `(2, 1, ...)` beside `(1, 2, ...)`."""
    first, blocks = mix(KVFirst, BlocksFirst, num_blocks=1)
    assert first.is_contiguous() and blocks.is_contiguous()


def test_rigid_blocks_first():
    """If it cannot take strides K/V-first can."""
    first, blocks = mix(KVFirst, rigid(BlocksFirst))
    assert blocks.is_contiguous() and first.stride() == (64, 128, 4, 4, 1)


def test_rigid_kv_first():
    first, blocks = mix(rigid(KVFirst), BlocksFirst)
    assert first.is_contiguous() and blocks.stride() == (64, 256, 4, 4, 1)


@pytest.mark.parametrize("other", [Fused, State, rigid(BlocksFirst)])
def test_refusal(other):
    """Where no direction works the start stops; users met an assertion about dimension 1."""
    with pytest.raises(KVLayoutError) as refusal:
        mix(rigid(KVFirst), other)
    text = str(refusal.value)
    assert "layer0" in text and "RigidKVFirst" in text and "does not read the strides" in text
    assert "--attention-backend" in text


def test_refusal_names_both_layers_and_what_to_set():
    with pytest.raises(KVLayoutError) as refusal:
        mix(rigid(KVFirst), Fused)
    text = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert "layer0 (RigidKVFirst, shape (2, 4, 16, 1, 4))" in text
    assert "layer1 (Fused, shape (4, 1, 16, 8))" in text
    assert "layer1's cache cannot be split into a K and a V half" in text
    assert "--attention-backend" in text and "--block-size" in text


def test_different_page_sizes_are_refused():
    """Pages of 512 and 768 bytes drift apart: page 2 of one is in page 1 of the other."""
    with pytest.raises(KVLayoutError, match="layer0 .* and layer1 .* share an allocation"):
        mix(BlocksFirst, Fused, specs=[full_spec(), full_spec(head_size=6)], num_blocks=6)


def natural(backend, spec, raw):
    """The view that the backend declares, unaligned."""
    groups = [group(backend, spec, "a")]
    return _reshape_kv_cache(groups, {"a": raw}, "auto", [spec.block_size], {})["a"]


def align(views, backends, spec, config=None, page_aligned=frozenset()):
    names = [f"layer{i}" for i in range(len(views))]
    groups = [group(b, spec, n, group_id=i) for i, (b, n) in enumerate(zip(backends, names))]
    config = config or shared_config(NB, groups)
    sizes = [spec.block_size] * len(groups)
    caches = dict(zip(names, views))
    _align_mixed_attention_kv_cache_views(groups, caches, sizes, "auto", config, page_aligned)


def test_page_aligned_layers_go_page_by_page():
    """The caller knows of a reason that the allocation does not show."""
    spec = full_spec()
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    views = [natural(KVFirst, spec, raw), natural(BlocksFirst, spec, raw)]
    align(views, [KVFirst, BlocksFirst], spec, page_aligned={"layer0"})
    assert views[0].stride() == (64, 128, 4, 4, 1) and views[1].is_contiguous()
    align(views, [KVFirst, BlocksFirst], spec, page_aligned={"layer0"})
    assert views[0].stride() == (64, 128, 4, 4, 1) and views[1].is_contiguous()


def test_page_aligned_layer_by_itself():
    spec = full_spec()
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    views = [natural(KVFirst, spec, raw)]
    align(views, [KVFirst], spec, page_aligned={"layer0"})
    assert views[0].stride() == (64, 128, 4, 4, 1)


def test_aligning_twice_changes_nothing():
    spec = full_spec()
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    views = [natural(KVFirst, spec, raw), natural(BlocksFirst, spec, raw)]
    for _ in range(2):
        align(views, [KVFirst, BlocksFirst], spec)
        assert views[1].stride() == (64, 256, 4, 4, 1)


def test_packed_tensors_are_left_alone():
    spec = full_spec()
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    views = [natural(KVFirst, spec, raw), natural(BlocksFirst, spec, raw)]
    groups = [group(KVFirst, spec, "layer0"), group(BlocksFirst, spec, "layer1", group_id=1)]
    align(views, [KVFirst, BlocksFirst], spec, shared_config(NB, groups, block_stride=512))
    assert all(view.is_contiguous() for view in views)


def test_values_stay_where_they_are():
    """In place and without a copy: what K/V-first wrote it still reads."""
    spec = full_spec(num_kv_heads=2)
    raw = torch.zeros(NB * spec.page_size_bytes, dtype=torch.int8)
    first, blocks = natural(KVFirst, spec, raw), natural(BlocksFirst, spec, raw)
    first.copy_(torch.arange(first.numel()).view(first.shape))
    before = first.clone()
    align([first, blocks], [KVFirst, BlocksFirst], spec)
    assert torch.equal(first, before)
    assert torch.equal(blocks.transpose(0, 1), before)


def test_fused_caches_are_never_restrided(monkeypatch):
    """Roles decide, not sizes: `(6, 2, 16, 32)` is six blocks of two heads."""
    handed = []
    helper = _restride_blocks_first_kv_cache_to_kv_first_storage

    def spy(kv_cache):
        handed.append(tuple(kv_cache.shape))
        helper(kv_cache)

    name = "_restride_blocks_first_kv_cache_to_kv_first_storage"
    monkeypatch.setattr(attn_utils, name, spy)
    first, fused = mix(KVFirst, Fused, num_kv_heads=2, head_size=16, num_blocks=6)
    assert fused.shape == (6, 2, 16, 32) and fused.is_contiguous() and handed == []
    mix(KVFirst, BlocksFirst)
    assert handed == [(4, 2, 16, 1, 4)]


@pytest.mark.parametrize("shape", [(6, 2, 16, 32), (2, 6, 16, 1, 4), (6, 3, 16, 1, 4), (2,)])
def test_restriding_other_shapes_is_an_error(shape):
    """Raised also under `python -O`, and before anything is changed."""
    cache = torch.zeros(shape)
    with pytest.raises(AssertionError, match=str(shape[0])):
        _restride_blocks_first_kv_cache_to_kv_first_storage(cache)
    assert cache.is_contiguous()


@given(
    st.lists(st.sampled_from(BACKENDS), min_size=2, max_size=3),
    st.integers(1, 3),
    st.sampled_from([2, 3, 16]),
    st.integers(1, 5),
    st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_mix_agrees_on_pages(backends, heads, head_size, num_blocks, ratios, dtype):
    """Every mix of backends that read strides is aligned: what one group writes into its page, no
    other group finds in a page of its own."""
    sizes = [16 // r if b is not State else 16 for b, r in zip(backends, ratios)]
    kwargs = dict(num_kv_heads=heads, head_size=head_size, dtype=dtype, num_blocks=num_blocks)
    views = mix(*backends, kernel_block_sizes=sizes, **kwargs)
    block_dims = [1 if backend is KVFirst else 0 for backend in backends]
    page = num_blocks - 1
    for writer, written in enumerate(views):
        for view in views:
            view.zero_()
        r = written.shape[block_dims[writer]] // num_blocks
        written.narrow(block_dims[writer], page * r, r).fill_(1)
        for view, block_dim in zip(views, block_dims):
            r = view.shape[block_dim] // num_blocks
            assert view.narrow(block_dim, 0, page * r).count_nonzero() == 0
            assert view.narrow(block_dim, page * r, r).count_nonzero() > 0

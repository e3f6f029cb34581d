# SPDX-License-Identifier: Apache-2.0
"""The geometry by example, numbers worked out by hand. Shapes are logical, strides said."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.import_graph import ROOT
from tests.v1.kv_cache_layouts import (
    BLOCKS_FIRST,
    FUSED,
    HND,
    KV_FIRST,
    blocks_first,
    fused,
    kv_first,
)
from vllm.v1.kv_cache_geometry import (
    Allocation,
    KVCacheConflict,
    KVCacheGeometry,
    LayerPlace,
    fused_fields,
    latent_fields,
    split_fields,
)

NB, BS, H, D = 4, 16, 1, 4  # a page: 128 elements of 4 bytes


def element_strides(geometry: KVCacheGeometry) -> tuple[int, ...]:
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    return geometry.view(raw).stride()


def test_geometry_needs_no_torch():
    """The scheduler and `vllm --help` must not pay seconds for arithmetic."""
    code = (
        "import sys\n"
        "from vllm.v1.kv_cache_geometry import KVCacheGeometry\n"
        "roles = 'kv', 'block', 'token', 'content'\n"
        "g = KVCacheGeometry.plan(roles, (2, 4, 16, 8), None, 'bfloat16', 4)\n"
        "assert g.page_runs(1) == [(256, 256), (1280, 256)], g.page_runs(1)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_natural_layouts_collide():
    """Blocks-first block 1 is elements 128 to 255: K of the K/V-first blocks 2 and 3. Unnoticed
    until two groups were busy."""
    first, blocks = kv_first(NB, BS, H, D), blocks_first(NB, BS, H, D)
    assert blocks.page_runs(1) == [(128 * 4, 128 * 4)]
    assert first.page_runs(2) == [(128 * 4, 64 * 4), ((256 + 128) * 4, 64 * 4)]
    assert first.conflict(blocks) == (0, 2)
    assert blocks.conflict(first) == (0, 1)
    with pytest.raises(KVCacheConflict, match="page 0 of layer self and page 2 of layer cross"):
        places = {"self": LayerPlace(0, None, first), "cross": LayerPlace(1, None, blocks)}
        Allocation(NB * 512, places).check()


def test_either_can_take_the_others_strides():
    """The two directions of alignment, in elements."""
    first, blocks = kv_first(NB, BS, H, D), blocks_first(NB, BS, H, D)
    paged = first.page_by_page(512)
    assert paged.shape == (2, 4, 16, 1, 4) and element_strides(paged) == (64, 128, 4, 4, 1)
    moved = blocks.kv_first()
    assert moved.shape == (4, 2, 16, 1, 4) and element_strides(moved) == (64, 256, 4, 4, 1)
    assert paged.owns_like(blocks) and moved.owns_like(first)
    assert first.is_kv_first and moved.is_kv_first
    assert not paged.is_kv_first and not blocks.is_kv_first


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_hnd_keeps_its_tail(heads):
    """HND blocks-first beside K/V-first was left as it was, with a warning."""
    natural = blocks_first(NB, BS, heads, D, HND)
    half = BS * heads * D
    assert element_strides(natural) == (2 * half, half, D, BS * D, 1)
    assert element_strides(natural.kv_first()) == (half, NB * half, D, BS * D, 1)


def test_one_head_keeps_its_stride():
    """Of a dimension of size 1 the stride means nothing, but kernels and tests read it."""
    roles, shape = ("block", "kv", "head", "token", "content"), (NB, 2, 1, BS, D)
    natural = KVCacheGeometry.plan(roles, shape, (0, 1, 3, 2, 4), "float32", NB)
    assert element_strides(natural) == (128, 64, 4, 4, 1)
    assert element_strides(natural.kv_first()) == (64, 256, 4, 4, 1)


def test_interleaved_tail_is_laid_anew():
    """Where K and V of a token lie beside each other there is no K half to move."""
    natural = blocks_first(NB, BS, 2, D, (0, 2, 1, 3, 4))
    moved = natural.kv_first()
    assert len(natural.page_runs(0)) == 1
    assert moved.owns_like(kv_first(NB, BS, 2, D))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_key_value_of_a_fused_cache(order):
    """Two heads look like K and V: roles say which dimension is which."""
    geometry = fused(NB, BS, 2, D, order)
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    key, value = geometry.key_value(raw)
    assert key.shape == value.shape == (NB, BS, 2, D)
    key.fill_(1), value.fill_(2)
    cache = geometry.view(raw)
    assert cache[..., :D].eq(1).all() and cache[..., D:].eq(2).all()
    assert geometry.conflict(blocks_first(NB, BS, 2, D)) is None


@pytest.mark.parametrize("make", [kv_first, blocks_first])
@pytest.mark.parametrize("paged", [False, True])
def test_key_value_of_a_split_cache(make, paged):
    """Kernels get the same two views whatever the layout: none of them knows one."""
    geometry = make(2, 4, 2, 8)
    geometry = geometry.page_by_page(geometry.payload + 64) if paged else geometry
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    key, value = geometry.key_value(raw)
    assert key.shape == value.shape == (2, 4, 2, 8)
    key.fill_(1), value.fill_(2)
    sides = geometry.view(raw).movedim(geometry.roles.index("kv"), 0)
    assert sides[0].eq(1).all() and sides[1].eq(2).all()


def test_padded_page():
    """The block dimension strides by the padded page; K and V stay half the unpadded one apart."""
    padded = blocks_first(NB, BS, H, D, pitch=640)
    assert element_strides(padded) == (160, 64, 4, 4, 1)
    assert padded.payload == 512 and padded.page_runs(3) == [(3 * 640, 512)]
    assert element_strides(blocks_first(NB, BS, H, D, HND, pitch=640)) == (160, 64, 4, 64, 1)


def test_page_smaller_than_its_pitch_is_refused():
    with pytest.raises(ValueError, match="1 kernel blocks of 512 bytes do not make a page of 508"):
        blocks_first(NB, BS, H, D, pitch=508)
    with pytest.raises(ValueError, match="3 kernel blocks of 512 bytes do not make a page of 1540"):
        blocks_first(NB, BS, H, D, r=3, pitch=1540)


@pytest.mark.parametrize("tokens", [528, 784])
def test_pages_of_hybrid_models(tokens):
    """528 and 784 tokens are no powers of two: cut into kernel blocks of 16, each page is whole and
    beside its neighbours, for every number of kernel blocks in it."""
    whole = fused(3, tokens, 2, 8, dtype="bfloat16")
    split = fused(3, 16, 2, 8, dtype="bfloat16", r=tokens // 16)
    assert split.tokens_per_page == whole.tokens_per_page == tokens
    assert split.owns_like(whole)
    assert split.page_runs(1) == [(whole.payload, whole.payload)]


def test_groups_with_kernel_blocks_of_their_own():
    """Kernel blocks are per group: page p is the same bytes with 1 block in it or with 4."""
    pages = [kv_first(NB, 64 // r, 2, 8, r=r) for r in (1, 2, 4)]
    pages += [blocks_first(NB, 64 // r, 2, 8, r=r).kv_first() for r in (1, 4)]
    assert all(one.owns_like(pages[0]) for one in pages)
    assert len(pages[2].page_runs(0)) == 2
    by_page = [one.page_by_page(one.payload) for one in pages]
    assert all(one.owns_like(fused(NB, 16, 2, 8, r=4)) for one in by_page)


def test_scales_inside_the_page():
    """int8 with a float32 scale for each token and head: 520 bytes for head size 256, 1032 for 512.
    As K and V beside each other or with a dimension of their own."""
    for head_size, per_token in ((256, 520), (512, 1032)):
        fields = fused_fields(head_size, "int8", scale_dtype="float32")
        shape = (2, 3, 16, 2 * (head_size + 4))
        one = KVCacheGeometry.plan(FUSED, shape, None, "int8", 2, fields=fields)
        assert one.payload == 3 * 16 * per_token
        assert [part.name for part in one.parts] == ["key", "key_scale", "value", "value_scale"]
        sides = split_fields(head_size, "int8", scale_dtype="float32")
        shape = (2, 2, 16, 3, head_size + 4)
        two = KVCacheGeometry.plan(BLOCKS_FIRST, shape, None, "int8", 2, fields=sides)
        assert two.payload == one.payload and two.owns_like(one)
        for geometry in (one, two):
            raw = torch.zeros(geometry.end, dtype=torch.int8)
            for value, name in enumerate(("key", "key_scale", "value", "value_scale"), 1):
                geometry.part(raw, name).fill_(value)
            assert geometry.part(raw, "key_scale").shape == (2, 16, 3, 1)
            assert geometry.part(raw, "key_scale").dtype == torch.float32
            for value, name in enumerate(("key", "key_scale", "value", "value_scale"), 1):
                assert geometry.part(raw, name).eq(value).all(), "parts overlap"


def test_pages_with_scales_share_a_padded_pool():
    """520 and 1032 bytes a token: no multiple of each other, so the smaller page is padded."""
    small = KVCacheGeometry.plan(FUSED, (4, 1, 16, 520), None, "int8", 4, pitch=16 * 1032)
    large = KVCacheGeometry.plan(FUSED, (4, 1, 16, 1032), None, "int8", 4)
    places = {"a": LayerPlace(0, None, small), "b": LayerPlace(1, None, large)}
    Allocation(4 * 16 * 1032, places).check()
    unpadded = KVCacheGeometry.plan(FUSED, (4, 1, 16, 520), None, "int8", 4)
    with pytest.raises(KVCacheConflict, match="layer a.*layer b"):
        places = {"a": LayerPlace(0, None, unpadded), "b": LayerPlace(1, None, large)}
        Allocation(4 * 16 * 1032, places).check()


def test_misaligned_scale_is_refused():
    """A float32 at byte 6 cannot be read on most devices."""
    fields = fused_fields(6, "int8", scale_dtype="float32")
    with pytest.raises(ValueError, match="key_scale is not aligned to 4 bytes"):
        KVCacheGeometry.plan(FUSED, (2, 1, 16, 20), None, "int8", 2, fields=fields)


@pytest.mark.parametrize("order", [(1, 0, 3, 2, 4), (1, 2, 0, 3, 4)])
def test_cross_layer_pool(order):
    """L = 2: blocks are 2 pages apart; a reader that took one page's stride was right for block 0
    only. NHD `(NB, L, BS, H, 2 * D)` and HND `(NB, H, L, BS, 2 * D)` in memory."""
    shape = (2, NB, 2, BS, 2 * D)
    pool = KVCacheGeometry.plan(
        ("layer", *FUSED), shape, order, "float32", NB, fields=fused_fields(D, "float32")
    )
    layers = [pool.layer(0), pool.layer(1)]
    raw = torch.zeros(pool.end, dtype=torch.int8)
    page = 2 * BS * 2 * D * 4
    for i, layer in enumerate(layers):
        assert layer.payload == page and layer.pitch == 2 * page
        layer.view(raw)[3] = i + 1
    assert pool.view(raw)[0, 3].eq(1).all() and pool.view(raw)[1, 3].eq(2).all()
    assert pool.view(raw)[:, :3].eq(0).all()
    places = {f"layer {i}": LayerPlace(0, None, layer) for i, layer in enumerate(layers)}
    Allocation(pool.end, places).check()


def test_packed_layers():
    """Two layers interleave in blocks of 1024 bytes; if they overlap, one writes the other's."""
    first = blocks_first(NB, BS, H, D, pitch=1024)
    second = blocks_first(NB, BS, H, D, pitch=1024, offset=512)
    third = blocks_first(NB, BS, H, D, pitch=1024, offset=508)
    assert second.page_runs(1) == [(1024 + 512, 512)]
    size = NB * 1024
    Allocation(size, {"a": (0, None, first), "b": (0, None, second)}).check()
    with pytest.raises(KVCacheConflict, match="page 0 of layer a and page 0 of layer c"):
        Allocation(size, {"a": (0, None, first), "c": (0, None, third)}).check()
    with pytest.raises(KVCacheConflict, match="layer b ends at byte 4096 of an allocation of 4095"):
        Allocation(size - 1, {"b": (0, None, second)}).check()


def test_same_bytes_in_one_group_are_refused():
    """Two layers of a group are written in the same step; of two groups only one holds a page."""
    one = fused(NB, BS, H, D)
    Allocation(one.end, {"full": (0, None, one), "window": (1, None, one)}).check()
    with pytest.raises(KVCacheConflict, match="page 0 of layer a and page 0 of layer b"):
        Allocation(one.end, {"a": (0, None, one), "b": (0, None, one)}).check()


def test_layers_that_read_anothers_cache():
    """An alias may lie where its target lies, and nowhere else."""
    one, elsewhere = fused(NB, BS, H, D), fused(NB, BS, H, D, offset=512)
    places = {"a": LayerPlace(0, None, one), "b": LayerPlace(0, "a", one)}
    places["c"] = LayerPlace(0, "b", one)
    Allocation(elsewhere.end, places).check()
    places["c"] = LayerPlace(0, "b", elsewhere)
    with pytest.raises(KVCacheConflict, match="layer c reads the KV cache of a, but"):
        Allocation(elsewhere.end, places).check()
    with pytest.raises(KVCacheConflict, match="in another allocation"):
        Allocation(one.end, {"b": LayerPlace(0, "a", one)}).check()


def test_state_pages():
    """A recurrent layer's page: conv (bfloat16) and ssm (float32) states, then padding."""
    shapes, dtypes = ((4, 3), (2, 3, 5)), ("bfloat16", "float32")
    state = KVCacheGeometry.plan_state(shapes, dtypes, NB, 512)
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    assert state.view(raw).shape == (NB, 1, 1, 512) and state.view(raw).dtype == torch.int8
    conv, ssm = state.part(raw, "conv"), state.part(raw, "ssm")
    assert conv.shape == (NB, 1, 1, 4, 3) and ssm.shape == (NB, 1, 1, 2, 3, 5)
    conv.fill_(1.0), ssm.fill_(2.0)
    assert conv.eq(1).all() and ssm.eq(2).all()
    assert ssm.data_ptr() - raw.data_ptr() == 24
    assert state.conflict(fused(NB, BS, H, D)) is None
    assert state.conflict(kv_first(NB, BS, H, D)) is not None
    with pytest.raises(ValueError, match="no part 'key'"):
        state.key_value(raw)


def test_latent_cache():
    """MLA keeps one latent a token; it has no K and V to hand out."""
    fields = latent_fields(576, "bfloat16")
    roles, shape = ("block", "token", "content"), (NB, 64, 576)
    mla = KVCacheGeometry.plan(roles, shape, None, "bfloat16", NB, fields=fields)
    raw = torch.zeros(mla.end, dtype=torch.int8)
    assert mla.part(raw, "latent").shape == shape and mla.payload == 64 * 576 * 2
    with pytest.raises(ValueError, match="no part 'key' \\(latent\\)"):
        mla.key_value(raw)


def test_heads_of_a_tensor_parallel_rank():
    """H = 2, 16 tokens, D = 4, K then V, HND: rank 0 of 2 needs elements [0, 64) and [128, 192) of
    a page, rank 1 the others."""
    whole = blocks_first(NB, 16, 2, 4, HND)
    for rank, starts in ((0, (0, 128)), (1, (64, 192))):
        part = whole.restrict(heads=(rank, rank + 1))
        page = 256 * 4
        assert part.page_runs(1) == [(page + start * 4, 64 * 4) for start in starts]
        raw = torch.arange(whole.end // 4, dtype=torch.float32)
        assert torch.equal(part.view(raw), whole.view(raw)[:, :, :, rank : rank + 1])
        assert torch.equal(part.key_value(raw)[1], whole.key_value(raw)[1][:, :, rank : rank + 1])


def test_tokens_of_a_smaller_block():
    """Pages of 16 tokens hold four blocks of 4, in one kernel block or in four."""
    for whole in (fused(NB, 16, 2, 4), fused(NB, 4, 2, 4, r=4)):
        pieces = [whole.restrict(tokens=(i, i + 4)) for i in (0, 4, 8, 12)]
        owned = {run for piece in pieces for run in piece.page_runs(1)}
        assert sum(n for _, n in owned) == whole.payload
        assert all(piece.num_pages == NB and piece.tokens_per_page == 4 for piece in pieces)
        assert all(a.conflict(b, distinct=False) is None for a in pieces for b in pieces if a != b)
    assert whole.restrict(tokens=(0, 16)) == whole
    with pytest.raises(ValueError, match="several kernel blocks of 4"):
        whole.restrict(tokens=(0, 8))
    with pytest.raises(ValueError, match="heads 1 to 3 of 2"):
        whole.restrict(heads=(1, 3))


def test_digest_tells_what_a_page_means():
    """Equal digests: copy run by run. A page's place, or storage K/V-first or not, changes nothing;
    NHD or HND, the dtype, what the content holds and kernel blocks of other sizes do."""
    base = kv_first(NB, BS, 2, D)
    same = [
        base.page_by_page(4096),
        dataclasses.replace(base, offset=64),
        kv_first(7, BS, 2, D),
        blocks_first(NB, BS, 2, D),
        blocks_first(NB, BS, 2, D).kv_first(),
    ]
    other = [
        kv_first(NB, BS, 2, D, HND),
        kv_first(NB, BS, 2, 2 * D, dtype="bfloat16"),
        kv_first(NB, BS // 2, 2, D, r=2),
        fused(NB, BS, 2, D),
        fused(NB, BS, 2, D, fields=()),
    ]
    assert {one.digest() for one in same} == {base.digest()}
    assert len({one.digest() for one in (base, *other)}) == len(other) + 1


def test_observing_refuses_to_guess():
    """Five dimensions and no roles: anything could be the blocks."""
    cache = torch.zeros(2, 2, 16, 1, 4)
    with pytest.raises(ValueError, match="tell one role for each dimension"):
        KVCacheGeometry.observe(cache, FUSED)
    with pytest.raises(ValueError, match="3 does not divide 2"):
        KVCacheGeometry.observe(cache, BLOCKS_FIRST, kernel_blocks_per_page=3)
    with pytest.raises(ValueError, match="elements share bytes"):
        KVCacheGeometry.observe(cache[:1].expand(4, 2, 16, 1, 4), BLOCKS_FIRST)
    with pytest.raises(ValueError, match="that of kv 2"):
        KVCacheGeometry.observe(torch.zeros(3, 2, 16, 1, 4), KV_FIRST)


def test_observing_counts_from_the_storage():
    """A cache that is a part of a larger tensor lies where it lies."""
    pool = torch.zeros(3, NB, 2, BS, H, D)
    seen = KVCacheGeometry.observe(pool[1], BLOCKS_FIRST)
    assert seen.offset == NB * 512 and seen.page_runs(1) == [(NB * 512 + 512, 512)]


def test_raw_tensor_in_the_middle_of_another():
    """Bytes count from where the tensor begins, not from where its storage does."""
    geometry = fused(NB, BS, H, D)
    pool = torch.zeros(geometry.end + 64, dtype=torch.int8)
    view = geometry.view(pool[64:])
    assert view.data_ptr() == pool.data_ptr() + 64
    with pytest.raises(ValueError, match="ends at byte 2048 in 1984 bytes"):
        geometry.view(pool[64:-64])


def test_view_of_too_few_bytes_is_refused():
    geometry = fused(NB, BS, H, D)
    with pytest.raises(ValueError, match="ends at byte 2048 in 2044 bytes"):
        geometry.view(torch.zeros(geometry.end - 4, dtype=torch.int8))


def test_description_names_what_one_needs():
    text = kv_first(NB, BS, H, D, r=2).describe()
    assert text == (
        "(kv 2, block 8, token 16, head 1, content 4) float32, "
        "byte strides (2048, 256, 16, 16, 4), "
        "4 pages (2 kernel blocks each) of 1024 bytes in 2 runs, 512 apart, from byte 0"
    )

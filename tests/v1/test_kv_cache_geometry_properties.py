# SPDX-License-Identifier: Apache-2.0
"""Any layout x stride order x dtype x kernel blocks x padding x packing, against brute force."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.v1.kv_cache_layouts import blocks_first, geometries, kv_first, page_bytes
from vllm.utils.torch_utils import str_dtype_to_torch_dtype
from vllm.v1.kv_cache_geometry import (
    Allocation,
    KVCacheConflict,
    KVCacheGeometry,
    LayerPlace,
    Ownership,
)
from vllm.v1.kv_cache_geometry.overlap import Strip, first_overlap, floor_sum


def nonzero_bytes(dtype: torch.dtype) -> torch.Tensor:
    """An element of that dtype none of whose bytes is 0."""
    return torch.full((dtype.itemsize,), 0x31, dtype=torch.uint8).view(dtype)[0]


@given(geometries(), st.data())
def test_writing_a_page_changes_the_bytes_it_owns(geometry: KVCacheGeometry, data):
    """A byte more: another page is corrupted. A byte less: a connector leaves it behind."""
    page = data.draw(st.integers(0, geometry.num_pages - 1))
    raw = torch.zeros(geometry.end + 5, dtype=torch.int8)
    dtype = str_dtype_to_torch_dtype(geometry.dtype)
    view = geometry.view(raw)
    assert view.dtype == dtype and tuple(view.shape) == geometry.shape
    r = geometry.kernel_blocks_per_page
    blocks = view.narrow(geometry.roles.index("block"), page * r, r)
    blocks.copy_(nonzero_bytes(dtype).expand(blocks.shape))
    assert set(raw.nonzero().flatten().tolist()) == page_bytes(geometry, page)
    assert sum(n for _, n in geometry.page_runs(page)) == geometry.payload


@given(geometries(), st.integers(0, 3))
def test_runs_are_merged_and_ascend(geometry: KVCacheGeometry, page: int):
    """Two runs that touch would be two descriptors, two requests to the network card."""
    assume(page < geometry.num_pages)
    runs = geometry.page_runs(page)
    assert all(start + n < later for (start, n), (later, _) in itertools.pairwise(runs))
    assert runs[-1][0] + runs[-1][1] <= geometry.end


@given(geometries(), st.data())
def test_pages_as_bytes(geometry: KVCacheGeometry, data):
    """What zeroing and copying go by: an index is a page, with all its bytes and no others."""
    page = data.draw(st.integers(0, geometry.num_pages - 1))
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    pages = geometry.page_view(raw)
    assert pages.shape[0] == geometry.num_pages and pages[0].numel() == geometry.payload
    pages[page].fill_(1)
    assert set(raw.nonzero().flatten().tolist()) == page_bytes(geometry, page)


@given(geometries())
def test_observing_what_was_planned(geometry: KVCacheGeometry):
    """A connector that looks at the runner's tensor must come to what the runner planned."""
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    seen = KVCacheGeometry.observe(
        geometry.view(raw),
        geometry.roles,
        kernel_blocks_per_page=geometry.kernel_blocks_per_page,
        fields=geometry.fields,
    )
    assert seen == geometry and seen.digest() == geometry.digest()


@given(geometries())
def test_restriding_is_planning(geometry: KVCacheGeometry):
    """In place or made new: the same view of the same bytes."""
    raw = torch.zeros(geometry.end, dtype=torch.int8)
    dense = torch.zeros(geometry.shape, dtype=str_dtype_to_torch_dtype(geometry.dtype))
    target = dense.set_(geometry.view(raw).untyped_storage(), 0, dense.shape, dense.stride())
    geometry.restride_(target)
    expected = geometry.view(raw)
    assert target.stride() == expected.stride() and target.data_ptr() == expected.data_ptr()


@given(geometries(), geometries(), st.booleans())
@example(kv_first(4, 16, 1, 4), blocks_first(4, 16, 1, 4), True)
@example(kv_first(4, 2, 1, 4), blocks_first(5, 3, 1, 4), False)
def test_first_conflict_against_brute_force(a: KVCacheGeometry, b: KVCacheGeometry, distinct: bool):
    """The closed form is what stands between two layers and silent corruption."""
    collisions = (
        (p, q)
        for p, q in itertools.product(range(a.num_pages), range(b.num_pages))
        if not (distinct and p == q) and page_bytes(a, p) & page_bytes(b, q)
    )
    assert a.conflict(b, distinct) == next(collisions, None)


@given(geometries(), geometries())
def test_same_ownership_against_brute_force(a: KVCacheGeometry, b: KVCacheGeometry):
    same = a.num_pages == b.num_pages and all(
        a.page_runs(p) == b.page_runs(p) for p in range(a.num_pages)
    )
    assert a.owns_like(b) == same
    assert a.owns_like(a) and a.conflict(a) is None


def allowed_by_brute_force(allocation: Allocation) -> bool:
    places = allocation.layers
    pages = {
        name: [page_bytes(place.geometry, p) for p in range(place.geometry.num_pages)]
        for name, place in places.items()
    }
    if any(b >= allocation.nbytes for name in pages for page in pages[name] for b in page):
        return False
    for one, other in itertools.combinations(places, 2):
        a, b = places[one], places[other]
        if other == a.alias_of or one == b.alias_of:
            if pages[one] != pages[other] or a.group != b.group:
                return False
            continue
        for (p, mine), (q, theirs) in itertools.product(
            enumerate(pages[one]), enumerate(pages[other])
        ):
            if mine & theirs and (p != q or a.group == b.group):
                return False
    return True


@st.composite
def allocations(draw) -> Allocation:
    """Two or three layers of one or two groups, often such that they fit."""
    if draw(st.booleans()):
        one = draw(geometries(max_pages=3))
        paged = one.page_by_page(one.payload)
        others = [one, paged, dataclasses.replace(paged, offset=paged.end)]
        chosen = [one, *(draw(st.sampled_from(others)) for _ in range(draw(st.integers(1, 2))))]
    else:
        chosen = draw(st.lists(geometries(max_pages=3), min_size=2, max_size=3))
    layers: dict[str, LayerPlace] = {}
    for i, geometry in enumerate(chosen):
        alias = "layer 0" if i == 1 and draw(st.booleans()) else None
        layers[f"layer {i}"] = LayerPlace(draw(st.integers(0, 2)), alias, geometry)
    end = max(geometry.end for geometry in chosen)
    return Allocation(end - draw(st.sampled_from((0, 0, 0, 1))), layers)


@settings(max_examples=200)
@given(allocations())
def test_check_against_brute_force(allocation: Allocation):
    """Refuses what collides, and nothing else: a wrong refusal stops a start that would be fine."""
    if allowed_by_brute_force(allocation):
        allocation.check()
    else:
        with pytest.raises(KVCacheConflict):
            allocation.check()


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 60), st.integers(-200, 200))
def test_floor_sum(n, m, a, b):
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(-250, 250),
    st.integers(0, 60),
    st.booleans(),
)
def test_lattice_points_of_a_strip(num_a, pitch_a, num_b, pitch_b, low, width, distinct):
    """Pitches that have nothing in common, unlike those of real pools."""
    strip = Strip(num_a, pitch_a, num_b, pitch_b, low, low + width, distinct)
    points = [
        (p, q)
        for p, q in itertools.product(range(num_a), range(num_b))
        if low <= p * pitch_a - q * pitch_b <= low + width and not (distinct and p == q)
    ]
    assert strip.count(num_a) == len(points)
    assert strip.first() == (points[0] if points else None)


def test_run_that_reaches_into_the_next_page_by_a_byte():
    """K/V-first and packed pages may begin anywhere, so runs wrap around the pitch."""
    a = Ownership(((7, 2),), 8, 4)
    assert first_overlap(a, Ownership(((0, 1),), 8, 4), distinct=True) == (0, 1)
    assert first_overlap(a, Ownership(((1, 1),), 8, 4), distinct=True) is None


def test_conflict_of_huge_caches():
    """No loop over pages: these have 10^12 each, and meet at the very end."""
    num, pitch = 10**12, 4096
    a = Ownership(((0, 4096),), pitch, num)
    b = Ownership(((num * pitch - 1, 1),), pitch, 1)
    assert first_overlap(a, b, distinct=True) == (num - 1, 0)
    c = Ownership(((num * pitch, 1),), pitch, num)
    assert first_overlap(a, c, distinct=True) is None

# SPDX-License-Identifier: Apache-2.0
"""Caches as later releases of upstream describe them: the six orders of [L, B, H, N, C]."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_cache_geometry import (
    Dim,
    KVCacheGeometry,
    PermutedCache,
    fused_fields,
    split_fields,
)
from vllm.v1.kv_cache_geometry.permutation import PERMUTATIONS

D = 4
FUSED = ("block", "head", "token", "content")


def cache(order: str, layers=3, blocks=4, heads=2, tokens=8, per_page=1, offset=0):
    shape = (layers, blocks, heads, tokens, 2 * D)
    fields = fused_fields(D, "float32")
    return PermutedCache(order, shape, "float32", fields, offset, per_page)


@pytest.mark.parametrize("order", PERMUTATIONS)
def test_memory_is_what_a_permuted_tensor_has(order):
    """Against torch: a dense tensor in the order's own shape, permuted to the logical one, has the
    same element at every place."""
    described = cache(order)
    pool = described.geometry()
    sizes = dict(zip("LBHNC", described.shape))
    dense = torch.arange(pool.end // 4, dtype=torch.int32).view([sizes[x] for x in order])
    logical = dense.permute([order.index(x) for x in "LBHNC"])
    view = pool.view(dense.view(-1).view(torch.int8)).view(torch.int32)
    assert torch.equal(view, logical)


@given(
    order=st.sampled_from(PERMUTATIONS),
    layers=st.integers(2, 4),
    heads=st.integers(2, 3),
    per_page=st.integers(1, 3),
    offset=st.sampled_from([0, 64]),
)
def test_describing_is_the_inverse_of_planning(order, layers, heads, per_page, offset):
    """The layers of a described pool are described as that pool: no field is lost on the way."""
    described = cache(order, layers, 2 * per_page, heads, 4, per_page, offset)
    pool = described.geometry()
    assert PermutedCache.of([pool.layer(i) for i in range(layers)]) == described


@pytest.mark.parametrize("order", PERMUTATIONS)
def test_gaps_between_layers_and_pages(order):
    """Layers of another group, or padding, may lie between: strides are then told, as upstream's
    `KVCacheTensor` tells them, and what holds no gap needs none told."""
    dense = cache(order).geometry()
    layer, page = dense.dim("layer").stride, dense.pitch
    outer, inner = (8, 2) if order.index("L") < order.index("B") else (2, 8)
    for strides in (
        {"layer_stride": 2 * layer},
        {"page_stride": 2 * page},
        {"layer_stride": outer * layer, "page_stride": inner * page},
    ):
        pool = dataclasses.replace(cache(order), **strides).geometry()
        found = PermutedCache.of([pool.layer(i) for i in range(3)])
        assert found.geometry() == pool
        assert order in found.describe() and f"{pool.pitch} bytes apart" in found.describe()
    alike = dataclasses.replace(cache(order), page_stride=dense.pitch)
    assert alike.geometry() == dense
    layers = [alike.geometry().layer(i) for i in range(3)]
    assert PermutedCache.of(layers).page_stride is None
    with pytest.raises(ValueError):
        dataclasses.replace(cache(order), page_stride=dense.pitch // 2).geometry()


@pytest.mark.parametrize(("stride_order", "name"), [((0, 2, 1, 3), "LBNHC"), (None, "LBHNC")])
def test_a_fused_cache_of_this_era(stride_order, name):
    """NHD and HND of a layer with an allocation of its own."""
    shape, fields = (4, 2, 8, 2 * D), fused_fields(D, "float32")
    one = KVCacheGeometry.plan(FUSED, shape, stride_order, "float32", 4, fields=fields)
    assert PermutedCache.of([one]).order == name


def test_a_cache_goes_from_one_era_into_the_other():
    """K/V-first pages of this era into the pool of the later one: what was written as K and V of
    a token is read as K and V of that token, and nothing else changes."""
    sides = split_fields(D, "float32")
    ours = KVCacheGeometry.plan(
        ("kv", "block", "token", "head", "content"), (2, 4, 8, 2, D), None, "float32", 4, fields=sides
    )
    theirs = cache("BLNHC").geometry().layer(1)
    source = torch.randn(ours.end // 4).view(torch.int8)
    target = torch.zeros(cache("BLNHC").geometry().end, dtype=torch.int8)
    for mine, other in zip(ours.key_value(source), theirs.key_value(target)):
        other[2].copy_(mine[3])
    for mine, other in zip(ours.key_value(source), theirs.key_value(target)):
        assert torch.equal(other[2], mine[3])
        other[2].zero_()
    assert not target.any(), "bytes of another page or layer were touched"


def planned(shape, pitch=None, roles=FUSED, order=None, offset=0):
    fields = (split_fields if "kv" in roles else fused_fields)(D, "float32")
    return KVCacheGeometry.plan(
        roles, shape, order, "float32", 4, pitch=pitch, fields=fields, offset=offset
    )


def test_what_has_no_name_there_is_refused():
    """A wrong name would make a connector read other bytes: refused, saying why."""
    plain = planned((4, 2, 8, 2 * D))
    with pytest.raises(ValueError, match="K and V are a dimension of their own"):
        PermutedCache.of([planned((4, 2, 8, 2, D), roles=("block", "kv", "token", "head", "content"))])
    apart = Dim("token", 8, 2 * plain.dim("token").stride)
    gaps = dataclasses.replace(
        planned((4, 2, 8, 2 * D), pitch=2048),
        dims=tuple(
            {"token": apart, "head": Dim("head", 2, 1024)}.get(dim.role, dim)
            for dim in planned((4, 2, 8, 2 * D), pitch=2048).dims
        ),
    )
    with pytest.raises(ValueError, match="gaps inside its pages"):
        PermutedCache.of([gaps])
    with pytest.raises(ValueError, match="none of LBHNC"):
        PermutedCache.of([planned((4, 2, 8, 2 * D), order=(2, 0, 1, 3))])
    with pytest.raises(ValueError, match="layer 1 is not like the first"):
        PermutedCache.of([plain, planned((4, 1, 8, 2 * D), offset=plain.end)])
    uneven = [dataclasses.replace(plain, offset=plain.end * i) for i in (0, 1, 3)]
    with pytest.raises(ValueError, match="layer 2"):
        PermutedCache.of(uneven)
    with pytest.raises(ValueError, match="no layers"):
        PermutedCache.of([])
    with pytest.raises(ValueError, match="'LBCNH' is none of LBHNC"):
        cache("LBCNH")

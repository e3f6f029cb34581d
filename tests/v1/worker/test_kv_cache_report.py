# SPDX-License-Identifier: Apache-2.0
"""The report of a worker's caches: the same geometries as a start has, drawn byte for byte."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given, settings

from tests.v1.kv_cache_layouts import blocks_first, fused, geometries, kv_first
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu.attn_utils import _allocate_kv_cache, _reshape_kv_cache
from vllm.v1.worker.kv_cache_drawing import draw_row, draw_svg, segments
from vllm.v1.worker.kv_cache_explain import as_text, as_values, explain
from vllm.v1.worker.kv_cache_layout import observe_allocations
from vllm.v1.worker.kv_cache_report import report_kv_cache
from vllm.v1.worker.utils import AttentionGroup

NUM_PAGES = 4
SHAPE = dict(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def case(full: str, sliding: str, layers: int = 2, num_pages: int = NUM_PAGES):
    """Layers of a full and of a sliding group, on two backends, two and two in one allocation."""
    backends = [AttentionBackendEnum[name].get_class() for name in (full, sliding)]
    specs = [FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=20)]
    names = [[f"layers.{2 * i + group}.attn" for i in range(layers)] for group in (0, 1)]
    groups = [AttentionGroup(b, n, s, g) for g, (b, n, s) in enumerate(zip(backends, names, specs))]
    size = num_pages * specs[0].page_size_bytes
    tensors = [KVCacheTensor(size, list(pair)) for pair in zip(*names)]
    config = KVCacheConfig(num_pages, tensors, list(map(KVCacheGroupSpec, names, specs)))
    return groups, config, "auto", [16, 16]


def report(*args, aligned: bool = True, **kwargs):
    return report_kv_cache("a model", *case(*args, **kwargs), aligned=aligned)


PAIRS = [
    ("ROCM_ATTN", "TRITON_ATTN"),
    ("ROCM_ATTN", "TORCH_ATTN"),
    ("TRITON_ATTN", "TORCH_ATTN"),
    ("CPU_ATTN", "CPU_ATTN"),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_report_is_what_a_start_has(pair):
    """Guards against a report of its own making: each geometry is that of the tensor that a runner
    would bind."""
    groups, config, cache_dtype, sizes = case(*pair)
    raw = _allocate_kv_cache(config, {}, torch.device("cpu"))
    caches = _reshape_kv_cache(groups, raw, cache_dtype, sizes, {}, config)
    observed = observe_allocations(groups, caches, cache_dtype, sizes, {})
    bound = {name: place.geometry for one in observed for name, place in one.layers.items()}
    told = report(*pair)
    assert told.is_sound
    assert {one.name: one.geometry for a in told.allocations for one in a.layers} == bound


def test_unaligned_is_refused():
    """Without alignment K/V-first and blocks-first collide, and the report says where."""
    told = report("ROCM_ATTN", "TRITON_ATTN", aligned=False)
    assert not told.is_sound
    assert "page 0 of layer layers.0.attn and page 2 of layer layers.1.attn" in (
        told.allocations[0].refusal or ""
    )


class Unmoved(AttentionBackendEnum.ROCM_ATTN.get_class()):
    """K/V-first, and its kernels take it for contiguous."""

    @staticmethod
    def reads_kv_cache_strides() -> bool:
        return False


def test_layers_that_cannot_be_aligned():
    """The refusal of a start is in the report, beside each cache as it would be by itself."""
    groups, *rest = case("ROCM_ATTN", "TORCH_ATTN")
    groups[0] = dataclasses.replace(groups[0], backend=Unmoved)
    told = report_kv_cache("a model", groups, *rest)
    assert "--attention-backend" in (told.allocations[0].refusal or "")
    assert not any(layer.is_aligned for layer in told.allocations[0].layers)
    assert "check: KV cache layers layers.0.attn" in as_text(told)
    assert "A start is refused" in explain(told, "layers.0", "layers.1")


def test_packed_layers_are_one_allocation():
    """Layers that interleave lie in the same bytes, though each has a tensor in the config."""
    groups, config, *rest = case("TRITON_ATTN", "TRITON_ATTN", layers=1)
    page = groups[0].kv_cache_spec.page_size_bytes
    tensors = [
        KVCacheTensor(NUM_PAGES * page, [group.layer_names[0]], i * page, 2 * page)
        for i, group in enumerate(groups)
    ]
    config = dataclasses.replace(config, kv_cache_tensors=tensors)
    (allocation,) = report_kv_cache("a model", groups, config, *rest).allocations
    assert allocation.nbytes == NUM_PAGES * 2 * page and allocation.refusal is None
    assert [one.geometry.offset for one in allocation.layers] == [0, page]


@given(geometries())
@settings(max_examples=150, deadline=None)
def test_segments_are_the_pages(geometry):
    """Each byte that a page owns is in one segment of that page, and no other byte in any."""
    found = segments(geometry)
    for page in range(geometry.num_pages):
        drawn = [b for s in found if s.page == page for b in range(s.offset, s.offset + s.length)]
        owned = [b for start, n in geometry.page_runs(page) for b in range(start, start + n)]
        assert sorted(drawn) == owned


@pytest.mark.parametrize(
    ("geometry", "row"),
    [
        (kv_first(2, 4, 1, 8), "|K0-|K1-|V0-|V1-|"),
        (blocks_first(2, 4, 1, 8), "|K0-|V0-|K1-|V1-|"),
        (fused(2, 4, 1, 8), "|KV0----|KV1----|"),
        (blocks_first(2, 2, 1, 8, r=2), "|-|-|-|-|-|-|-|-|"),
        (blocks_first(2, 4, 1, 8, pitch=512), "|K0|V0......|K1|V1......|"),
    ],
)
def test_row(geometry, row):
    """A row is a map of the allocation, to scale."""
    nbytes = geometry.num_pages * geometry.pitch * (2 if geometry.is_kv_first else 1)
    assert draw_row(geometry, nbytes, len(row) - 1) == row


def test_alike_allocations_are_drawn_once():
    told = report("ROCM_ATTN", "TRITON_ATTN", layers=3)
    assert [len(alike) for alike in told.alike()] == [3]
    text = as_text(told)
    assert text.count("check: passed") == 1 and "allocations 0-2: 16,384 bytes each" in text


def test_svg_has_each_page_to_scale():
    """Well-formed, and each bar of a page is as wide as its share of the allocation."""
    told = report("ROCM_ATTN", "TRITON_ATTN", layers=1)
    root = ET.fromstring(draw_svg(told))
    svg = "{http://www.w3.org/2000/svg}"
    widths = [float(box.get("width", "")) for box in root.iter(svg + "rect")]
    # The background, and for each of two layers the allocation, then K and V of each page.
    assert len(widths) == 1 + 2 * (1 + 2 * NUM_PAGES)
    assert widths[1] == 8 * widths[2] == 912
    labels = [text.text for text in root.iter(svg + "text")]
    assert labels.count("K1") == labels.count("V3") == 2


def test_svg_of_too_many_pages_is_refused():
    with pytest.raises(ValueError, match="--num-gpu-blocks-override"):
        draw_svg(report("CPU_ATTN", "CPU_ATTN", num_pages=17))
    assert "at most 16 pages" in as_text(report("CPU_ATTN", "CPU_ATTN", num_pages=17))


def test_values_are_json():
    told = report("ROCM_ATTN", "TRITON_ATTN")
    values = json.loads(json.dumps(as_values(told)))
    layer = values["allocations"][1]["layers"][1]
    assert layer["name"] == "layers.3.attn" and layer["is_aligned"]
    assert layer["page_0_runs"] == [[0, 2048], [8192, 2048]]


@pytest.mark.parametrize(
    ("pair", "names", "said"),
    [
        (PAIRS[0], ("layers.0", "layers.1"), "both hold bytes 8,192 to 10,239"),
        (PAIRS[0], ("layers.0", "layers.1"), "So layers.1.attn is aligned: all K before all V"),
        (PAIRS[1], ("layers.0", "layers.1"), "So layers.0.attn is aligned: page by page"),
        (PAIRS[2], ("layers.0", "layers.1"), "no page of one holds bytes of another page"),
        (PAIRS[0], ("layers.0", "layers.2"), "both are in group 0"),
        (PAIRS[0], ("layers.0", "layers.3"), "layers.3.attn would be aligned: all K before all V"),
    ],
)
def test_explained(pair, names, said):
    assert said in explain(report(*pair), *names)


def test_layers_are_found_by_a_part_of_their_names():
    told = report(*PAIRS[0])
    for names, message in (
        (("layers.0", "attn"), "several layers have 'attn'"),
        (("layers.0", "nothing"), "no layer has 'nothing'"),
        (("layers.0", "layers.0.attn"), "are both layers.0.attn"),
    ):
        with pytest.raises(ValueError, match=message):
            explain(told, *names)

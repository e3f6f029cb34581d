# SPDX-License-Identifier: Apache-2.0
"""The report of a worker's caches as text and as JSON values, and why two layers may share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_geometry import KVCacheGeometry, KVLayoutError, align
from vllm.v1.worker.kv_cache_drawing import (
    MAX_PAGES,
    allocation_title,
    check_line,
    draw_row,
    layer_note,
)
from vllm.v1.worker.kv_cache_places import AllocationReport, KVCacheReport, LayerReport

RULE = (
    "A page is one group's at a time: page p of one layer may lie where page p of the other does, "
    "and nowhere else."
)


def as_text(report: KVCacheReport) -> str:
    """For a terminal; allocations that differ in layer names alone are drawn once."""
    return "\n".join(_text_lines(report))


def _text_lines(report: KVCacheReport) -> Iterator[str]:
    yield report.title
    yield f"{report.num_pages} pages a layer; page 0 is never handed out"
    for alike in report.alike():
        first = alike[0]
        yield ""
        yield allocation_title(alike)
        for layer in first.layers:
            yield f"  {layer.name}"
            yield f"    {layer_note(layer)}"
            yield f"    {layer.geometry.describe()}"
            if report.num_pages <= MAX_PAGES:
                yield f"    {draw_row(layer.geometry, first.nbytes)}"
        yield f"  check: {check_line(first)}"
    if not report.allocations:
        yield "no layer has a KV cache"
    if report.num_pages > MAX_PAGES:
        yield f"(drawn are at most {MAX_PAGES} pages: --num-gpu-blocks-override)"


def as_values(report: KVCacheReport) -> dict[str, Any]:
    """For JSON; lengths and offsets in bytes."""
    return {
        "title": report.title,
        "num_pages": report.num_pages,
        "is_sound": report.is_sound,
        "allocations": [
            {
                "number": allocation.number,
                "nbytes": allocation.nbytes,
                "refusal": allocation.refusal,
                "layers": [_layer_values(layer) for layer in allocation.layers],
            }
            for allocation in report.allocations
        ],
    }


def _layer_values(layer: LayerReport) -> dict[str, Any]:
    geometry = layer.geometry
    return {
        "name": layer.name,
        "group": layer.group,
        "kind": layer.kind,
        "backend": layer.backend,
        "is_aligned": layer.is_aligned,
        "dtype": geometry.dtype,
        "roles": geometry.roles,
        "shape": geometry.shape,
        "strides": [dim.stride for dim in geometry.dims],
        "offset": geometry.offset,
        "page_pitch": geometry.pitch,
        "page_payload": geometry.payload,
        "kernel_blocks_per_page": geometry.kernel_blocks_per_page,
        "tokens_per_page": layer.tokens_per_page,
        "page_0_runs": geometry.page_runs(0),
        "digest": geometry.digest(),
    }


def explain(report: KVCacheReport, one: str, other: str) -> str:
    """Why two layers, named as `KVCacheReport.find` takes them, may share an allocation or not.

    Raises:
        ValueError: a name is no layer's, or both are one layer's.
    """
    (place_a, a), (place_b, b) = report.find(one), report.find(other)
    if a is b:
        raise ValueError(f"{one!r} and {other!r} are both {a.name}; name two layers")
    lines = [_describe(place_a, a), _describe(place_b, b)]
    if place_a is place_b:
        lines += _of_one_allocation(place_a, a, b)
    else:
        lines.append(
            f"They lie in different allocations, {place_a.number} and {place_b.number}: nothing that "
            "one writes is the other's."
        )
        lines += _if_they_shared(a, b)
    return "\n".join(lines)


def _describe(place: AllocationReport, layer: LayerReport) -> str:
    return f"{layer.name}: allocation {place.number}, {layer_note(layer)}"


def _of_one_allocation(place: AllocationReport, a: LayerReport, b: LayerReport) -> Iterator[str]:
    yield f"They share allocation {place.number}."
    if a.group == b.group:
        yield (
            f"Both are in group {a.group}, so a request uses page p of both at once: they may share "
            "no byte."
        )
    else:
        yield f"They are in groups {a.group} and {b.group}. {RULE}"
    distinct = a.group != b.group
    found = a.own.geometry.conflict(b.own.geometry, distinct)
    yield "Each as its backend lays it out: " + _collision(a, b, a.own.geometry, b.own.geometry, found)
    for layer in (a, b):
        if layer.is_aligned:
            yield f"So {layer.name} is aligned: {_change(layer.own.geometry, layer.geometry)}."
    if place.refusal is not None:
        yield f"A start is refused: {place.refusal}"
    elif a.is_aligned or b.is_aligned:
        yield "Then no page of one holds bytes of another page of the other."


def _if_they_shared(a: LayerReport, b: LayerReport) -> Iterator[str]:
    if a.group == b.group:
        yield (
            f"They could not share one page for page: both are in group {a.group}, so a request uses "
            "page p of both at once."
        )
        return
    yield f"If they shared one, in groups {a.group} and {b.group}: {RULE}"
    mine, theirs = a.own.geometry, b.own.geometry
    found = mine.conflict(theirs)
    yield "Each as its backend lays it out: " + _collision(a, b, mine, theirs, found)
    try:
        changed = align([a.own, b.own])
    except KVLayoutError as error:
        yield f"They could not: {error}"
        return
    for layer in (a, b):
        if layer.name in changed:
            yield f"{layer.name} would be aligned: " + _change(
                layer.own.geometry, changed[layer.name]
            ) + "."
    yield "They could."


def _collision(
    a: LayerReport,
    b: LayerReport,
    mine: KVCacheGeometry,
    theirs: KVCacheGeometry,
    found: tuple[int, int] | None,
) -> str:
    if found is None:
        return "no page of one holds bytes of another page of the other."
    runs = (
        (max(start_a, start_b), min(start_a + length_a, start_b + length_b))
        for start_a, length_a in mine.page_runs(found[0])
        for start_b, length_b in theirs.page_runs(found[1])
    )
    start, end = next(run for run in sorted(runs) if run[0] < run[1])
    return (
        f"page {found[0]} of {a.name} and page {found[1]} of {b.name} both hold bytes {start:,} to "
        f"{end - 1:,}."
    )


def _change(before: KVCacheGeometry, after: KVCacheGeometry) -> str:
    old, new = ([dim.stride for dim in geometry.dims] for geometry in (before, after))
    how = "all K before all V" if after.is_kv_first else "page by page"
    return f"{how}, byte strides {tuple(new)} instead of {tuple(old)}, shape {after.shape}"

# SPDX-License-Identifier: Apache-2.0
"""Two backends over one allocation: right, refused with advice, or a finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_platform_kit.backends import (
    LAYOUTS,
    backend_name,
    head_sizes,
    kernel_block_sizes,
)
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.kv_cache_geometry.kv_cache_drawing import draw_svg
from vllm_platform_kit.kv_cache_geometry.kv_cache_places import KVCacheReport
from vllm_platform_kit.views import (
    NUM_PAGES,
    Layer,
    Unavailable,
    in_words,
    layout_set,
    make_views,
    refusal_is_clear,
    report_allocations,
)

HEADS = (1, 2, 8)
RATIOS = (1, 4)


@dataclass
class Outcome:
    """findings; notes: what was refused, with the reason; drawing: an SVG of the first case that is
    faulty, else of the first."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drawing: str = ""
    is_faulty: bool = False
    num_right: int = 0


def check_pair(one: type, other: type, layout: str) -> Outcome:
    """Heads {1, 2, 8} x pages of {1, 4} kernel blocks, in one layout; a backend beside itself is only
    looked at for what it declares.

    Raises:
        Unavailable: the engine lays caches out elsewhere.
    """
    outcome = Outcome()
    backends = [one] if one is other else [one, other]
    names = " beside ".join(backend_name(backend) for backend in backends)
    try:
        head_size = head_sizes(backends)[0]
        tokens = kernel_block_sizes(backends)[0]
    except ValueError as error:
        outcome.notes.append(f"{names} never meet: {error}")
        return outcome
    cases: dict[str, list[tuple[str, Finding]]] = {}
    with layout_set(layout):
        for heads in HEADS:
            for ratio in RATIOS:
                sizes = heads, head_size, tokens, ratio
                for one in _check_case(outcome, backends, f"{names}, {layout}", sizes):
                    cases.setdefault(one.code, []).append((f"{heads}x{ratio}", one))
    outcome.findings = [_as_one(found) for found in cases.values()]
    return outcome


def _as_one(cases: list[tuple[str, Finding]]) -> Finding:
    """The findings of one kind: the first, with the cases that have it."""
    first = cases[0][1]
    listed = ", ".join(dict.fromkeys(case for case, _ in cases))
    subject = f"{first.subject}, heads x kernel blocks a page {listed}"
    return Finding(first.code, subject, first.what)


def _check_case(
    outcome: Outcome, backends: list[type], subject: str, sizes: tuple[int, int, int, int]
) -> list[Finding]:
    """sizes: heads, head size, tokens in a kernel block, kernel blocks in a page."""
    title = f"{subject}, heads x kernel blocks a page {sizes[0]}x{sizes[3]}"
    try:
        layers = make_views(backends, *sizes)
    except Unavailable:
        raise
    except Exception as error:
        if refusal_is_clear(error):
            outcome.notes.append(f"{title}: refused: {error}")
            return []
        code = "ALIGNMENT_CRASH" if len(backends) > 1 else "LAYOUT_DECLARED"
        return [Finding(code, subject, in_words(error))]
    found = list(examine(layers, subject))
    outcome.num_right += not found
    if found and not outcome.is_faulty or not outcome.drawing:
        outcome.drawing, outcome.is_faulty = draw(layers, title), bool(found)
    return found


def examine(layers: list[Layer], subject: str) -> Iterator[Finding]:
    """What is wrong with caches that are bound or about to be: their pages, shapes and strides."""
    for allocation in report_allocations(layers):
        if allocation.refusal:
            yield Finding("ALIGNMENT_PAGES", subject, allocation.refusal)
    for layer in layers:
        for found in layer.misplaced():
            if found.code == "LAYOUT_ORDER" and len(layers) > 1 and _is_moved(layer, layers):
                yield Finding("ALIGNMENT_STRIDES", subject, found.what)
            else:
                yield found


def _is_moved(layer: Layer, layers: list[Layer]) -> bool:
    """Whether the layer shares its memory with one of another backend, so that alignment has been at
    its strides."""
    pointer = layer.tensor.untyped_storage().data_ptr()
    return any(
        other.backend is not layer.backend
        and other.tensor.untyped_storage().data_ptr() == pointer
        for other in layers
    )


def draw(layers: list[Layer], title: str) -> str:
    """An SVG of the layers' pages; empty where they are too many."""
    allocations = tuple(report_allocations(layers))
    try:
        return draw_svg(KVCacheReport(title, layers[0].geometry.num_pages, allocations))
    except ValueError:
        return ""


__all__ = ["HEADS", "LAYOUTS", "NUM_PAGES", "RATIOS", "Outcome", "check_pair", "draw", "examine"]

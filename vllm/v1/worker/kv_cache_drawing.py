# SPDX-License-Identifier: Apache-2.0
"""Which bytes of an allocation each page of a layer owns, as lines of text and as an SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from vllm.v1.kv_cache_geometry import KVCacheGeometry
from vllm.v1.worker.kv_cache_places import AllocationReport, KVCacheReport, LayerReport

MAX_PAGES = 16
MAX_SEGMENTS = 96
TEXT_COLUMNS = 80


@dataclass(frozen=True)
class Segment:
    """Bytes that follow one another and belong to one page. side: `K`, `V`, `KV` (both, in turns),
    or empty: something else."""

    offset: int
    length: int
    page: int
    side: str

    @property
    def label(self) -> str:
        return f"{self.side}{self.page}"


def segments(geometry: KVCacheGeometry) -> list[Segment]:
    """The bytes of all pages in ascending order: K and V apart where each has one run a block."""
    found = [one for page in range(geometry.num_pages) for one in _sides(geometry, page)]
    num_blocks = geometry.num_pages * geometry.kernel_blocks_per_page
    if not found or len(found) > min(2 * num_blocks, MAX_SEGMENTS):
        names = {part.name for part in geometry.parts}
        side = "KV" if {"key", "value"} <= names else ""
        pages = range(geometry.num_pages)
        found = [Segment(*run, page, side) for page in pages for run in geometry.page_runs(page)]
    return sorted(found, key=lambda one: one.offset)


def _sides(geometry: KVCacheGeometry, page: int) -> Iterator[Segment]:
    """K and V of a page, empty where it has no such parts. A scale goes with its side."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for name, found in geometry.part_runs(page).items():
        side = {"key": "K", "value": "V"}.get(name.partition("_")[0])
        if side is None:
            return
        runs.setdefault(side, []).extend(found)
    for side, found in runs.items():
        joined: list[tuple[int, int]] = []
        for offset, length in sorted(found):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        yield from (Segment(*run, page, side) for run in joined)


def draw_row(geometry: KVCacheGeometry, nbytes: int, columns: int = TEXT_COLUMNS) -> str:
    """One line: each segment begins at `|` and is as long as its share of the allocation; dots are
    bytes of no page. A segment too short for its label has none."""
    row = ["."] * columns
    for segment in segments(geometry):
        begin = round(segment.offset / nbytes * columns)
        end = max(round((segment.offset + segment.length) / nbytes * columns), begin + 1)
        width = min(end, columns) - begin
        label = segment.label if len(segment.label) < width else ""
        row[begin:end] = list(("|" + label).ljust(width, "-")[:width])
    return "".join(row) + "|"


def check_drawable(report: KVCacheReport) -> None:
    """Raises:
    ValueError: the pages are too many to be told apart.
    """
    if report.num_pages > MAX_PAGES:
        raise ValueError(
            f"{report.num_pages} pages cannot be drawn, at most {MAX_PAGES}; set "
            "--num-gpu-blocks-override"
        )


# SVG. Lengths are pixels.

WIDTH, MARGIN, BAR, LINE = 960, 24, 30, 18
INK, FAINT, ALARM = "#1b1f24", "#57606a", "#c4181f"
# Page 0, which is never handed out, is grey; the others go round these.
NULL_PAGE = "#c3c9d0"
PAGES = ("#4e9bd9", "#f0a63c", "#4bb58b", "#d987b8", "#8e7cc3", "#c9b72f", "#df7c5b")


def draw_svg(report: KVCacheReport) -> str:
    """The whole report; allocations that differ in layer names alone are drawn once.

    Raises:
        ValueError: the pages are too many to be told apart.
    """
    check_drawable(report)
    canvas = _Canvas()
    canvas.text(report.title, size=17, weight="bold", advance=26)
    canvas.text(
        f"{report.num_pages} pages a layer; page 0, grey, is never handed out", FAINT, advance=30
    )
    for alike in report.alike():
        _draw_allocation(canvas, alike)
    return canvas.finish()


class _Canvas:
    """Elements from the top down; `y` is where the next one begins."""

    def __init__(self) -> None:
        self.y = MARGIN
        self.parts: list[str] = []

    def text(
        self, text: str, fill: str = INK, size: int = 13, weight: str = "normal", advance: int = LINE
    ) -> None:
        self.parts.append(
            f'<text x="{MARGIN}" y="{self.y + size}" font-size="{size}" font-weight="{weight}" '
            f'fill="{fill}">{escape(text)}</text>'
        )
        self.y += advance

    def label(self, text: str, x: float, y: float, fill: str, size: int, anchor: str) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}">{escape(text)}</text>'
        )

    def box(self, x: float, width: float, fill: str, stroke: str, opacity: float = 1) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{self.y}" width="{width:.1f}" height="{BAR}" fill="{fill}" '
            f'fill-opacity="{opacity}" stroke="{stroke}"/>'
        )

    def finish(self) -> str:
        height = self.y + MARGIN // 2
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                f'viewBox="0 0 {WIDTH} {height}" font-family="DejaVu Sans, Arial, sans-serif">',
                f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _draw_allocation(canvas: _Canvas, alike: list[AllocationReport]) -> None:
    first = alike[0]
    canvas.text(allocation_title(alike), weight="bold", advance=LINE + 8)
    bytes_drawn = set()
    for layer in first.layers:
        canvas.text(layer.name, advance=LINE - 1)
        canvas.text(layer_note(layer), FAINT, size=12, advance=LINE + 4)
        _draw_bar(canvas, layer.geometry, first.nbytes)
        bytes_drawn |= {one.offset for one in segments(layer.geometry)}
        canvas.y += BAR + 10
    _draw_axis(canvas, sorted(bytes_drawn | {first.nbytes}), first.nbytes)
    sound = first.refusal is None
    for line in _wrapped("check: " + check_line(first), 125):
        canvas.text(line, FAINT if sound else ALARM, size=12)
    canvas.y += 20


def _draw_bar(canvas: _Canvas, geometry: KVCacheGeometry, nbytes: int) -> None:
    scale = (WIDTH - 2 * MARGIN) / nbytes
    canvas.box(MARGIN, nbytes * scale, "#f3f4f6", "#d0d7de")
    for segment in segments(geometry):
        colour = PAGES[(segment.page - 1) % len(PAGES)] if segment.page else NULL_PAGE
        x, width = MARGIN + segment.offset * scale, segment.length * scale
        canvas.box(x, width, colour, "#ffffff", 0.5 if segment.side == "V" else 1)
        if width > 8 * len(segment.label) + 2:
            canvas.label(segment.label, x + width / 2, canvas.y + 20, INK, 13, "middle")


def _draw_axis(canvas: _Canvas, places: list[int], nbytes: int) -> None:
    """Byte numbers below the bars, as many as do not run into each other."""
    scale = (WIDTH - 2 * MARGIN) / nbytes
    last = -1.0
    end = MARGIN + nbytes * scale
    for place in places:
        x, size = MARGIN + place * scale, 6.5 * len(f"{place:,}")
        is_last = place == nbytes
        if not is_last and (x < last or x + size > end - 6.5 * len(f"{nbytes:,}") - 6):
            continue
        anchor = "end" if is_last else "start"
        canvas.label(f"{place:,}", x, canvas.y + 4, FAINT, 10, anchor)
        last = x + size + 6
    canvas.y += 16


def _wrapped(text: str, columns: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= columns and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# Sentences that text and SVG have in common.


def allocation_title(alike: list[AllocationReport]) -> str:
    """Which allocations, and how large."""
    first = alike[0]
    size = f"{first.nbytes:,} bytes"
    if len(alike) == 1:
        return f"allocation {first.number}: {size}"
    return f"allocations {_ranges([one.number for one in alike])}: {size} each; drawn: {first.number}"


def _ranges(numbers: list[int]) -> str:
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    runs = [numbers[i:j] for i, j in pairwise([0, *breaks, len(numbers)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layer_note(layer: LayerReport) -> str:
    """Group, kind, backend, shape, and how a page is laid."""
    geometry = layer.geometry
    inner = " > ".join(role for role in geometry.memory_roles if role != "block")
    aligned = "; aligned with the others" if layer.is_aligned else ""
    return (
        f"group {layer.group}, {layer.kind.replace('_', ' ')}, {layer.backend}: "
        f"{geometry.shape} {geometry.dtype}; in a page: {inner}{aligned}"
    )


def check_line(allocation: AllocationReport) -> str:
    """The result of the check."""
    return allocation.refusal or "passed, no page holds bytes of another page"

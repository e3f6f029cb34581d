# SPDX-License-Identifier: Apache-2.0
"""Layers of several groups in one allocation: made to agree on which bytes a page is, or refused.

K/V-first storage and page-by-page storage do not agree: page 1 of one lies in page 0's V of the
other. Either can be given the other's strides, without moving a byte, if its kernels read strides:

    K/V-first beside caches with a K/V dimension    those go K/V-first, the storage stays
    K/V-first beside anything else                  K/V-first goes page by page
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .geometry import KVCacheGeometry


class KVLayoutError(ValueError):
    """Layers cannot share an allocation; says which, why, and what to set."""


@dataclass(frozen=True)
class LayerLayout:
    """A layer's cache as it would be by itself.

    page_size_bytes: from page to page, where pages lie one after the other.
    takes_strides: the backend's kernels address the cache by the view's strides.
    page_by_page: its pages must lie one after the other (padded, or told so).
    """

    layer: str
    backend: str
    geometry: KVCacheGeometry
    page_size_bytes: int
    takes_strides: bool = True
    page_by_page: bool = False

    def __str__(self) -> str:
        return f"{self.layer} ({self.backend}, shape {self.geometry.shape})"


def align(layouts: Sequence[LayerLayout]) -> dict[str, KVCacheGeometry]:
    """New geometries, by layer, of those layers of one allocation whose views must change so that
    all agree; empty where they do.

    Raises:
        KVLayoutError: they cannot be made to.
    """
    must_move = any(one.page_by_page and one.geometry.is_kv_first for one in layouts)
    found = _disagreement(layouts, {})
    if found is None and not must_move:
        return {}
    kv_first = [one for one in layouts if one.geometry.is_kv_first]
    others = [one for one in layouts if not one.geometry.is_kv_first]
    reasons = []
    for plan in (_to_kv_first, _to_page_by_page):
        changed = plan(kv_first, others)
        if isinstance(changed, str):
            reasons.append(changed)
        elif (found := _disagreement(layouts, changed)) is None:
            return changed
        else:
            reasons.append("even then they disagree")
    one, other = found or (layouts[0], layouts[-1])
    raise KVLayoutError(_refusal(one, other, reasons))


def _disagreement(
    layouts: Sequence[LayerLayout], changed: dict[str, KVCacheGeometry]
) -> tuple[LayerLayout, LayerLayout] | None:
    for one, other in itertools.combinations(layouts, 2):
        mine = changed.get(one.layer, one.geometry)
        theirs = changed.get(other.layer, other.geometry)
        if mine.conflict(theirs) is not None:
            return one, other
    return None


def _to_kv_first(
    kv_first: list[LayerLayout], others: list[LayerLayout]
) -> dict[str, KVCacheGeometry] | str:
    """The others' geometries on K/V-first storage, or why there are none."""
    if any(one.page_by_page for one in kv_first):
        return "pages must lie one after the other"
    changed = {}
    for one in others:
        if "kv" not in one.geometry.roles or one.geometry.payload != one.page_size_bytes:
            return f"{one.layer}'s cache cannot be split into a K and a V half"
        if one.page_by_page:
            return f"{one.layer}'s pages must lie one after the other"
        if not one.takes_strides:
            return f"{one.backend} does not read the strides of its cache"
        changed[one.layer] = one.geometry.kv_first()
    return changed


def _to_page_by_page(
    kv_first: list[LayerLayout], others: list[LayerLayout]
) -> dict[str, KVCacheGeometry] | str:
    """The K/V-first geometries, page by page, or why there are none."""
    changed = {}
    for one in kv_first:
        if not one.takes_strides:
            return f"{one.backend} does not read the strides of its cache"
        try:
            changed[one.layer] = one.geometry.page_by_page(one.page_size_bytes)
        except ValueError as error:
            return f"{one.layer}: {error}"
    return changed


def _refusal(one: LayerLayout, other: LayerLayout, reasons: list[str]) -> str:
    return (
        f"KV cache layers {one} and {other} share an allocation, but a page of one holds bytes of "
        f"other pages of the other, and neither can be given the other's strides: "
        f"{'; '.join(dict.fromkeys(reasons))}. Set --attention-backend to one backend for both, or "
        "to one that reads strides; if kernel blocks do not fit their pages, set --block-size"
    )

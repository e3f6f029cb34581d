# SPDX-License-Identifier: Apache-2.0
"""An allocation and the layers whose caches lie in it: the proof that none harms another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .geometry import KVCacheGeometry
from .overlap import Ownership, candidates, first_overlap


class KVCacheConflict(ValueError):
    """Two layers would write each other's bytes, or one writes outside its allocation."""


class LayerPlace(NamedTuple):
    """A layer's KV-cache group, the layer whose cache it reads (None: it has its own), and where
    that is."""

    group: int
    alias_of: str | None
    geometry: KVCacheGeometry


@dataclass(frozen=True)
class Allocation:
    """`nbytes` of memory and the layers in it by name, each a `LayerPlace` or its three values."""

    nbytes: int
    layers: Mapping[str, LayerPlace]

    def __post_init__(self) -> None:
        places = {name: LayerPlace(*place) for name, place in self.layers.items()}
        object.__setattr__(self, "layers", places)

    def check(self) -> None:
        """Proves that sharing is safe: every byte lies inside; layers of different groups share
        bytes only where their page is the same (the pool gives a page to one group); layers of one
        group share none, unless one reads the other's cache.

        Raises:
            KVCacheConflict: names the layers, and the first pages that collide.
        """
        owners: dict[Ownership, dict[int, str]] = {}
        for name, (group, alias_of, geometry) in self.layers.items():
            if geometry.offset < 0 or geometry.end > self.nbytes:
                raise KVCacheConflict(
                    f"the KV cache of layer {name} ends at byte {geometry.end} of an allocation of "
                    f"{self.nbytes}: {geometry.describe()}"
                )
            if alias_of is not None:
                self._check_alias(name)
                continue
            by_group = owners.setdefault(geometry.ownership(), {})
            if group in by_group:
                self._refuse(by_group[group], name, (0, 0))
            by_group[group] = name
        self._check_apart(owners)

    def _check_apart(self, owners: dict[Ownership, dict[int, str]]) -> None:
        ownerships, tenants = list(owners), list(owners.values())
        for i, j in candidates(ownerships):
            common = tenants[i].keys() & tenants[j].keys()
            # Within a group pages of one number must be apart too.
            pages = first_overlap(ownerships[i], ownerships[j], distinct=not common)
            if pages is not None:
                one, other = (min(common),) * 2 if common else (min(tenants[i]), min(tenants[j]))
                self._refuse(tenants[i][one], tenants[j][other], pages)

    def _check_alias(self, name: str) -> None:
        target = self.layers[name].alias_of
        for _ in self.layers:  # an alias of an alias is one of its target
            if target in self.layers and self.layers[target].alias_of is not None:
                target = self.layers[target].alias_of
        if target not in self.layers:
            raise KVCacheConflict(
                f"layer {name} reads the KV cache of {target}, which is in another allocation"
            )
        mine, theirs = self.layers[name].geometry, self.layers[target].geometry
        if self.layers[name].group != self.layers[target].group:
            raise KVCacheConflict(
                f"layer {name} reads the KV cache of {target}, but is in another group: it would "
                "look up pages in a block table that is not its target's"
            )
        if not mine.owns_like(theirs):
            raise KVCacheConflict(
                f"layer {name} reads the KV cache of {target}, but takes its pages to be "
                f"elsewhere: {mine.describe()}; they are {theirs.describe()}"
            )

    def _refuse(self, one: str, other: str, pages: tuple[int, int]) -> None:
        raise KVCacheConflict(
            f"page {pages[0]} of layer {one} and page {pages[1]} of layer {other} share bytes of "
            f"one allocation: {one} is {self.layers[one].geometry.describe()}; {other} is "
            f"{self.layers[other].geometry.describe()}"
        )

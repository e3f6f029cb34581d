# SPDX-License-Identifier: Apache-2.0
"""Memory that is registered for transfers, and where in it pages lie. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.kv_cache_geometry import KVCacheGeometry


@dataclass(frozen=True)
class Region:
    """Memory that is registered: `nbytes` from `address` on."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.address + self.nbytes


@dataclass(frozen=True)
class RegisteredLayer:
    """One layer's pages. The geometry's offsets count from `base`, an address; `alias_of` is the
    layer whose very pages these are. sliding_window: tokens; pages before it may be gone. 0: none."""

    name: str
    group: int
    backend: str
    base: int
    geometry: KVCacheGeometry
    alias_of: str | None = None
    sliding_window: int = 0

    def page_runs(self, page: int) -> list[tuple[int, int]]:
        """(address, bytes) of everything that `page` owns, ascending."""
        return [(self.base + offset, n) for offset, n in self.geometry.page_runs(page)]


@dataclass(frozen=True)
class Registration:
    """Regions, and the layers in them by name. `num_blocks`: pages of each layer."""

    num_blocks: int
    regions: tuple[Region, ...]
    layers: Mapping[str, RegisteredLayer]

    def group_layers(self, group: int) -> list[RegisteredLayer]:
        """The group's layers that have pages of their own."""
        layers = self.layers.values()
        return [one for one in layers if one.group == group and one.alias_of is None]

    def page_runs(self, group: int, page: int) -> list[tuple[int, int]]:
        """(address, bytes) of all that `page` owns in the layers of a group; runs that touch are
        one."""
        runs = sorted(run for one in self.group_layers(group) for run in one.page_runs(page))
        merged: list[tuple[int, int]] = []
        for address, nbytes in runs:
            if merged and sum(merged[-1]) == address:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((address, nbytes))
        return merged

    @property
    def kernel_blocks_per_page(self) -> tuple[int, ...]:
        """r of each group."""
        by_group = {one.group: one.geometry.kernel_blocks_per_page for one in self.layers.values()}
        return tuple(by_group[group] for group in sorted(by_group))

    @property
    def common_kernel_blocks_per_page(self) -> int:
        """The largest number that r of every group is a multiple of: r itself where all agree."""
        return math.gcd(*self.kernel_blocks_per_page)

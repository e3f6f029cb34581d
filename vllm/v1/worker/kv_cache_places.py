# SPDX-License-Identifier: Apache-2.0
"""Allocations, the layers in them, and whether they may be: what is drawn and reported."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_geometry import KVCacheGeometry, LayerLayout


@dataclass(frozen=True)
class LayerReport:
    """A layer in its allocation. kind: of its KV cache, such as `sliding_window`. own: its cache as
    the backend lays it out by itself; geometry: as it is beside the others."""

    name: str
    group: int
    kind: str
    tokens_per_page: int
    own: LayerLayout
    geometry: KVCacheGeometry

    @property
    def backend(self) -> str:
        return self.own.backend

    @property
    def is_aligned(self) -> bool:
        """Whether its strides are others than its backend's."""
        return self.geometry != self.own.geometry


@dataclass(frozen=True)
class AllocationReport:
    """`nbytes` of memory. refusal: why a start would end here; None: it would not. If it is that
    layers cannot be aligned, each is as by itself."""

    number: int
    nbytes: int
    layers: tuple[LayerReport, ...]
    refusal: str | None

    def is_like(self, other: AllocationReport) -> bool:
        """Whether they differ in their layers' names alone."""
        return self._without_names() == other._without_names()

    def _without_names(self) -> tuple:
        layers = ((one.group, one.backend, one.geometry) for one in self.layers)
        return self.nbytes, tuple(layers), self.refusal is None


@dataclass(frozen=True)
class KVCacheReport:
    """title: the model and the platform. num_pages: of each layer, page 0 included, which is never
    handed out."""

    title: str
    num_pages: int
    allocations: tuple[AllocationReport, ...]

    @property
    def is_sound(self) -> bool:
        """Whether a start would pass."""
        return all(allocation.refusal is None for allocation in self.allocations)

    def alike(self) -> list[list[AllocationReport]]:
        """Allocations that differ in layer names alone, together."""
        sets: list[list[AllocationReport]] = []
        for allocation in self.allocations:
            same = next((one for one in sets if one[0].is_like(allocation)), None)
            if same is None:
                sets.append([allocation])
            else:
                same.append(allocation)
        return sets

    def find(self, name: str) -> tuple[AllocationReport, LayerReport]:
        """The layer of that name, or the only one whose name holds it.

        Raises:
            ValueError: there is none, or there are several.
        """
        layers = [(a, layer) for a in self.allocations for layer in a.layers]
        found = [one for one in layers if one[1].name == name]
        found = found or [one for one in layers if name in one[1].name]
        if len(found) == 1:
            return found[0]
        names = [layer.name for _, layer in found or layers]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        what = "several layers have" if found else "no layer has"
        raise ValueError(f"{what} {name!r} in the name: {listed}")

# SPDX-License-Identifier: Apache-2.0
"""From a worker with bound caches to findings: which layers share memory, and whether they may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kv_guard.caches import LayerCache, layer_caches
from vllm_kv_guard.connectors import Registration, wrong_registrations
from vllm_kv_guard.kv_cache_geometry import Allocation, KVCacheConflict, LayerPlace

_SHOWN = 4


@dataclass
class Report:
    """What was found. `connectors`: those that were handed caches. `unknown`: layers, or more, that
    could not be looked at, with the reason. `seconds`: of the processor, for all of
    it."""

    num_layers: int = 0
    num_allocations: int = 0
    kinds: Counter = field(default_factory=Counter)
    connectors: tuple[str, ...] = ()
    conflicts: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """All was looked at, and nothing collides."""
        return not self.conflicts and not self.unknown

    def line(self) -> str:
        """All of it, for the log."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        handed = f", handed to {', '.join(self.connectors)}" if self.connectors else ""
        seen = (
            f"{self.num_layers} layers in {self.num_allocations} allocations ({kinds}; "
            f"{1000 * self.seconds:.0f} ms){handed}"
        )
        words = []
        if self.conflicts:
            words.append(f"KV CACHES ARE WRONG: {_first(self.conflicts)}")
        if self.unknown:
            words.append(f"not looked at: {_first(self.unknown)}")
        return f"{seen}: {'. '.join(words) or 'no two share bytes they must not'}"


def _first(texts: list[str]) -> str:
    """What is wrong once is wrong in each of a hundred layers; a few are enough to know."""
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN] + ([f"and {more} more like these"] if more > 0 else []))


def examine(worker, kv_cache_config, registrations: Sequence[Registration | str] = ()) -> Report:
    """Looks at every cache of `worker`, a vLLM worker that has bound them, and at what connectors were
    handed; texts among that are what could not be seen of it. Reads shapes and strides only; no
    device does anything."""
    report = Report()
    caches = []
    for found in layer_caches(worker, kv_cache_config):
        if isinstance(found, str):
            report.unknown.append(found)
        else:
            caches.append(found)
    report.num_layers = len({cache.layer for cache in caches})
    report.kinds = Counter(cache.kind for cache in caches)
    allocations = list(_allocations(caches))
    report.num_allocations = len(allocations)
    report.conflicts += [cache.mis_stride for cache in caches if cache.mis_stride]
    for allocation in allocations:
        try:
            allocation.check()
        except KVCacheConflict as conflict:
            report.conflicts.append(f"{conflict} [{_backends(allocation, caches)}]")
    report.unknown += [one for one in registrations if isinstance(one, str)]
    registrations = [one for one in registrations if not isinstance(one, str)]
    report.connectors = tuple(dict.fromkeys(r.connector for r in registrations))
    report.conflicts += wrong_registrations(registrations, caches, kv_cache_config.num_blocks)
    return report


def _allocations(caches: Iterable[LayerCache]) -> Iterator[Allocation]:
    """One for each storage that caches lie in."""
    sizes: dict[int, int] = {}
    places: dict[int, dict[str, LayerPlace]] = {}
    for cache in caches:
        storage = cache.tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        place = LayerPlace(cache.group, cache.alias_of, cache.geometry)
        places.setdefault(storage.data_ptr(), {})[cache.name] = place
    for pointer, layers in places.items():
        yield Allocation(sizes[pointer], layers)


def _backends(allocation: Allocation, caches: Iterable[LayerCache]) -> str:
    names = {cache.backend for cache in caches if cache.name in allocation.layers}
    return f"backends: {', '.join(sorted(names))}"

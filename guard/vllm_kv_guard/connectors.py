# SPDX-License-Identifier: Apache-2.0
"""What KV connectors are handed, and whether it is what the layers read and write.

A connector moves the bytes of a page by the view that `register_kv_caches` gave it. If that view is
not the layer's own, or has other pages, it sends one request's bytes as another's, silently.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vllm_kv_guard.caches import LayerCache, tensors_of
from vllm_kv_guard.kv_cache_geometry import KVCacheGeometry

_BASE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METHODS = ("register_kv_caches", "register_cross_layers_kv_cache")


@dataclass(frozen=True)
class Registration:
    """One call. `caches`: a dict, layer -> its cache or caches, or one tensor of all layers."""

    connector: str
    caches: Any


@contextmanager
def watch(vllm_config: Any) -> Iterator[list[Registration | str]]:
    """Notes what the connectors that are made meanwhile are handed meanwhile; a text for one that
    cannot be watched. Their constructor is wrapped, and the methods of each one; both are put back."""
    registrations: list[Registration | str] = []
    base = _connector_base() if getattr(vllm_config, "kv_transfer_config", None) else None
    if base is None:
        yield registrations
        return
    original, watched = base.__init__, []

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        watched.append(self)
        try:
            for method in _METHODS:
                if hasattr(type(self), method):
                    vars(self)[method] = _noting(self, method, registrations)
        except Exception as error:  # A guard must not take down what it guards.
            reason = f"{type(error).__name__}: {error}"
            registrations.append(f"what connector {type(self).__name__} is handed ({reason})")

    base.__init__ = __init__
    try:
        yield registrations
    finally:
        base.__init__ = original
        for connector in watched:
            with suppress(Exception):
                for method in _METHODS:
                    vars(connector).pop(method, None)


def _connector_base() -> type | None:
    try:
        return importlib.import_module(_BASE_MODULE).KVConnectorBase_V1
    except (ImportError, AttributeError):
        return None  # No connector can be made either.


def _noting(connector: Any, method: str, registrations: list[Registration | str]):
    original = getattr(connector, method)

    def register(kv_caches, *args, **kwargs):
        registrations.append(Registration(type(connector).__name__, kv_caches))
        return original(kv_caches, *args, **kwargs)

    return register


def wrong_registrations(
    registrations: Iterable[Registration], caches: Iterable[LayerCache], num_pages: int
) -> Iterator[str]:
    """How what connectors were handed is not what the layers have; a text for each."""
    by_layer: dict[str, list[LayerCache]] = {}
    for cache in caches:
        by_layer.setdefault(cache.layer, []).append(cache)
    handed: dict[str, set[str]] = {}
    for registration in registrations:
        names = handed.setdefault(registration.connector, set())
        for name, tensors in _by_layer(registration.caches, by_layer):
            names.add(name)
            for problem in _differences(tensors, by_layer.get(name), num_pages):
                yield f"connector {registration.connector} was handed {problem} for layer {name}"
    for connector, names in handed.items():
        for name, own in by_layer.items():
            if name not in names and own[0].alias_of not in names and own[0].is_transferred:
                yield f"connector {connector} was handed nothing for layer {name}"


def _by_layer(registered: Any, layers: Iterable[str]) -> Iterator[tuple[str, list[Any]]]:
    """A tensor of all layers stands for each of them."""
    if isinstance(registered, dict):
        for name, value in registered.items():
            yield name, list(tensors_of(value))
    else:
        for name in layers:
            yield name, [registered]


def _differences(
    tensors: list[Any], own: list[LayerCache] | None, num_pages: int
) -> Iterator[str]:
    """A layer that could not be looked at is not spoken of here."""
    if own is None:
        return
    for cache in own:
        problems = [_difference(tensor, cache, num_pages) for tensor in tensors]
        if not tensors:
            yield "an empty cache"
        elif None not in problems:
            yield problems[min(own.index(cache), len(problems) - 1)]


def _difference(tensor: Any, cache: LayerCache, num_pages: int) -> str | None:
    """None if, along one of its dimensions, each page of `tensor` holds the bytes of that page of the
    layer. Which dimension that is the connector has to know; that there is one is proved here."""
    if tensor.untyped_storage().data_ptr() != cache.tensor.untyped_storage().data_ptr():
        return "other memory than it uses"
    bound, nearest, unlike = cache.geometry, None, None
    for dim, size in enumerate(tensor.shape):
        ratio, rest = divmod(size, num_pages)
        if rest or not ratio:
            continue
        roles = ["content"] * tensor.dim()
        roles[dim] = "block"
        try:
            seen = KVCacheGeometry.observe(tensor, roles, kernel_blocks_per_page=ratio, fields=())
        except ValueError as error:
            unlike = error
            continue
        if _holds(seen, bound):
            return None
        nearest = nearest or seen
    if nearest is None and unlike is not None:
        return f"a view of shape {tuple(tensor.shape)} that is no cache ({unlike})"
    if nearest is None:
        return (
            f"a cache of shape {tuple(tensor.shape)}, no dimension of which is the {num_pages} pages "
            "that the manager hands out"
        )
    return f"other bytes ({nearest.describe()}) than it uses ({bound.describe()})"


def _holds(seen: KVCacheGeometry, bound: KVCacheGeometry) -> bool:
    """Whether pages lie equally far apart, and each of `seen` has all the bytes of the other's."""
    if seen.num_pages > 1 and seen.pitch != bound.pitch:
        return False
    outer = seen.page_runs(0)
    return all(
        any(start <= run and run + length <= start + size for start, size in outer)
        for run, length in bound.page_runs(0)
    )

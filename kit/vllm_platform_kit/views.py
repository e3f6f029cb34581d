# SPDX-License-Identifier: Apache-2.0
"""The views that the engine's runner makes of raw memory for one backend, or for two that share it."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm_platform_kit.backends import Declared, backend_name, declared
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.kv_cache_geometry import (
    Allocation,
    KVCacheConflict,
    KVCacheGeometry,
    LayerLayout,
    LayerPlace,
)
from vllm_platform_kit.kv_cache_geometry.kv_cache_places import AllocationReport, LayerReport

NUM_PAGES = 6
REFUSALS = (ValueError, NotImplementedError)


class Unavailable(Exception):
    """The engine has no such part; says which."""


@dataclass(frozen=True)
class Layer:
    """A layer's cache and what its backend declares of it."""

    name: str
    group: int
    kind: str
    backend: type
    spec: object
    tensor: torch.Tensor
    declared: Declared
    geometry: KVCacheGeometry

    def misplaced(self) -> Iterator[Finding]:
        """Whether shape and order in memory are those declared. K and V may be moved out of their
        blocks: that is how caches share K/V-first storage."""
        subject = f"{backend_name(self.backend)} (layer {self.name})"
        tokens = self.geometry.dim("token").size
        rows = self.geometry.dim("block").size
        shape = self.backend.get_kv_cache_shape(
            rows, tokens, self.spec.num_kv_heads, self.spec.head_size, "auto"
        )
        if tuple(shape) != self.geometry.shape:
            what = f"the cache is {self.geometry.shape}, declared is {tuple(shape)}"
            yield Finding("LAYOUT_SHAPE", subject, what)
        sizes = {dim.role: dim.size for dim in self.geometry.dims}

        def order(roles: tuple[str, ...]) -> list[str]:
            return [role for role in roles if role != "kv" and sizes[role] > 1]

        found, wanted = order(self.geometry.memory_roles), order(self.declared.memory_roles)
        if found != wanted:
            what = f"in memory by {', '.join(found)}, declared is by {', '.join(wanted)}"
            yield Finding("LAYOUT_ORDER", subject, f"{what}: {self.geometry.describe()}")

    def report(self) -> LayerReport:
        """For drawings."""
        plain = KVCacheGeometry.plan(
            self.geometry.roles,
            self.geometry.shape,
            self.declared.order,
            self.geometry.dtype,
            self.geometry.num_pages,
            offset=self.geometry.offset,
            kernel_blocks_per_page=self.geometry.kernel_blocks_per_page,
            fields=self.geometry.fields,
        )
        own = LayerLayout(self.name, backend_name(self.backend), plain, plain.payload)
        per_page = self.geometry.tokens_per_page
        return LayerReport(self.name, self.group, self.kind, per_page, own, self.geometry)


def observe(
    name: str, group: int, kind: str, backend: type, spec: object, tensor: torch.Tensor,
    num_pages: int,
) -> Layer:  # fmt: skip
    """A layer's cache as it is.

    Raises:
        ValueError: it has not the declared dimensions, or no whole number of kernel blocks a page.
    """
    says = declared(backend)
    if tensor.dim() != len(says.roles):
        raise ValueError(
            f"its cache {tuple(tensor.shape)} should have the dimensions {', '.join(says.roles)}"
        )
    rows = tensor.shape[says.roles.index("block")]
    ratio, rest = divmod(rows, num_pages)
    if rest or not ratio:
        raise ValueError(f"{rows} blocks are no multiple of {num_pages} pages")
    geometry = KVCacheGeometry.observe(tensor, says.roles, kernel_blocks_per_page=ratio)
    return Layer(name, group, kind, backend, spec, tensor, says, geometry)


def make_views(
    backends: list[type], heads: int, head_size: int, kernel_tokens: int, ratio: int
) -> list[Layer]:
    """A layer a backend, each of a group of its own, over one allocation, as the engine's runner makes
    and aligns them.

    Raises:
        Unavailable: this engine has no such runner.
        whatever the runner raises.
    """
    try:
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )
        from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
        from vllm.v1.worker.utils import AttentionGroup
    except ImportError as error:
        raise Unavailable(f"this engine's runner makes views otherwise: {error.msg}") from error
    spec = FullAttentionSpec(
        block_size=kernel_tokens * ratio,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=torch.float32,
    )
    names = [f"layers.{i}.attn" for i in range(len(backends))]
    groups = [
        AttentionGroup(backend, [name], spec, i)
        for i, (backend, name) in enumerate(zip(backends, names))
    ]
    raw = torch.zeros(NUM_PAGES * spec.page_size_bytes, dtype=torch.int8)
    config = KVCacheConfig(
        num_blocks=NUM_PAGES,
        kv_cache_tensors=[KVCacheTensor(size=raw.numel(), shared_by=names)],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name in names],
    )
    extra = {}
    if "kv_cache_config" in inspect.signature(_reshape_kv_cache).parameters:
        extra = {"kv_cache_config": config}
    sizes = [kernel_tokens] * len(names)
    caches = _reshape_kv_cache(groups, dict.fromkeys(names, raw), "auto", sizes, {}, **extra)
    return [
        observe(name, i, "full_attention", backend, spec, caches[name], NUM_PAGES)
        for i, (name, backend) in enumerate(zip(names, backends))
    ]


def allocations(layers: list[Layer]) -> list[tuple[int, dict[str, LayerPlace]]]:
    """The bytes of each storage and the layers in it. Layers of one group over the same bytes are not
    taken for aliases: who binds them so says so."""
    sizes: dict[int, int] = {}
    places: dict[int, dict[str, LayerPlace]] = {}
    for layer in layers:
        storage = layer.tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        place = LayerPlace(layer.group, None, layer.geometry)
        places.setdefault(storage.data_ptr(), {})[layer.name] = place
    return [(sizes[pointer], inside) for pointer, inside in places.items()]


def report_allocations(layers: list[Layer]) -> list[AllocationReport]:
    """Each storage with its layers and whether they may share it."""
    by_name = {layer.name: layer for layer in layers}
    reports = []
    for number, (nbytes, places) in enumerate(allocations(layers)):
        refusal = None
        try:
            Allocation(nbytes, places).check()
        except KVCacheConflict as conflict:
            refusal = str(conflict)
        inside = tuple(by_name[name].report() for name in places)
        reports.append(AllocationReport(number, nbytes, inside, refusal))
    return reports


@contextmanager
def layout_set(layout: str) -> Iterator[None]:
    """With NHD or HND for backends that do either.

    Raises:
        Unavailable: this engine has no such setting.
    """
    try:
        from vllm.v1.attention.backends.utils import set_kv_cache_layout
    except ImportError as error:
        what = "this engine has no set_kv_cache_layout, it lays caches out otherwise"
        raise Unavailable(what) from error
    set_kv_cache_layout(layout)
    try:
        yield
    finally:
        set_kv_cache_layout(None)


def refusal_is_clear(error: Exception) -> bool:
    """Whether a refusal is one on purpose, and says more than a type's name."""
    return isinstance(error, REFUSALS) and len(str(error).split()) > 3


def in_words(error: Exception) -> str:
    """The kind of error, what it says, and where it was raised."""
    return f"{type(error).__name__}: {error} ({where(error)})".replace(":  (", " (")


def where(error: BaseException) -> str:
    """File, line and function that raised it; empty for one that was only made."""
    places = traceback.extract_tb(error.__traceback__)[-1:]
    return "".join(f"{os.path.basename(p.filename)}:{p.lineno} in {p.name}" for p in places)

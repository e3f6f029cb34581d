# SPDX-License-Identifier: Apache-2.0
"""Which memory is registered for transfers, and where in it each page of each layer lies.

Nothing is inferred from the size of a cache's first dimension. A kernel may take blocks that are
smaller than the manager's pages, r of them a page, and then a cache of NB pages has NB * r rows; or
it has NB rows all the same. What a cache is follows from its geometry:

* it has `num_blocks` pages or more, counted in tokens (those behind the last one are left alone);
* every byte of those pages lies in the allocation that the config gives the layer;
* no two pages of the allocation share bytes that they must not.

An allocation is one registered region, whoever shares it. A page in it is one run of bytes where
pages lie one after the other, and two, K and V, where all K lie before all V; layers that interleave
in packed blocks are one run of the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import (
    Region,
    RegisteredLayer,
    Registration,
)
from vllm.utils.math_utils import exact_div
from vllm.v1.attention.kv_cache_plan import STATE_ROLES, backend_layout, observe_layer
from vllm.v1.kv_cache_geometry import (
    Allocation,
    KVCacheConflict,
    KVCacheGeometry,
    LayerPlace,
    shape_and_stride,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    import torch


def plan_registration(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, type],
    cache_dtype: str = "auto",
) -> Registration:
    """What is to be registered for `kv_caches`.

    Args:
        kv_caches: each layer's cache, as the layer sees it.
        backends: each layer's attention backend.
        cache_dtype: as in `--kv-cache-dtype`.

    Raises:
        ValueError: a layer's cache has fewer than `kv_cache_config.num_blocks` pages, owns bytes
            outside its allocation, or shares bytes of different pages with another; the message
            says layer, expected blocks, shape, stride, spec, backend, all backends and layout.
    """
    num_blocks = kv_cache_config.num_blocks
    refusal = partial(_refusal, num_blocks, kv_caches, backends, cache_dtype)
    seen: dict[str, RegisteredLayer] = {}
    specs: dict[str, KVCacheSpec] = {}
    for group, group_spec in enumerate(kv_cache_config.kv_cache_groups):
        for name in group_spec.layer_names:
            spec = specs[name] = group_spec.kv_cache_spec
            if name not in kv_caches:
                raise ValueError(f"no KV cache was handed over for layer {name}")
            try:
                geometry = _observe(kv_caches[name], backends[name], spec, cache_dtype, num_blocks)
            except ValueError as error:
                raise refusal(name, spec, str(error)) from error
            base = _storage(kv_caches[name]).address
            backend = backend_name(backends[name])
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
            seen[name] = RegisteredLayer(name, group, backend, base, geometry, None, window)
    memory = {name: _storage(kv_caches[name]) for name in seen}
    regions, layers = [], {}
    for tensors in _pools(kv_cache_config.kv_cache_tensors):
        region, placed = _place(
            tensors, num_blocks, seen, memory, lambda name, why: refusal(name, specs[name], why)
        )
        regions.append(region)
        layers.update(placed)
    for name in (name for name in seen if name not in layers):
        raise refusal(name, specs[name], "the config gives it no allocation")
    _check_regions_apart(regions, layers, lambda name, why: refusal(name, specs[name], why))
    return Registration(num_blocks, tuple(regions), {name: layers[name] for name in seen})


def _storage(kv_cache: torch.Tensor) -> Region:
    storage = kv_cache.untyped_storage()
    return Region(storage.data_ptr(), storage.nbytes())


def backend_name(backend: type) -> str:
    """A backend's name; third parties' may be plain classes."""
    get_name = getattr(backend, "get_name", None)
    return get_name() if get_name else backend.__qualname__


def _observe(
    kv_cache: torch.Tensor, backend: type, spec: KVCacheSpec, cache_dtype: str, num_blocks: int
) -> KVCacheGeometry:
    """The geometry of the first `num_blocks` pages. How many rows a page has is told by the tokens
    in a row, never by the number of rows."""
    is_attention = isinstance(spec, AttentionSpec)
    roles = backend_layout(backend, cache_dtype).roles if is_attention else STATE_ROLES
    if kv_cache.dim() != len(roles):
        raise ValueError(f"its dimensions should be {', '.join(roles)}")
    tokens = kv_cache.shape[roles.index("token")] if is_attention else spec.block_size
    if spec.block_size % tokens:
        raise ValueError(f"blocks of {tokens} tokens do not make pages of {spec.block_size}")
    per_page = exact_div(spec.block_size, tokens)
    block_dim = roles.index("block")
    if kv_cache.shape[block_dim] < num_blocks * per_page:
        each = f" of {per_page} kernel blocks" if per_page > 1 else ""
        raise ValueError(f"it has {kv_cache.shape[block_dim]} blocks, too few for the pages{each}")
    used = kv_cache.narrow(block_dim, 0, num_blocks * per_page)
    geometry = observe_layer(used, backend, spec, cache_dtype, tokens)
    if is_attention and geometry.payload != spec.real_page_size_bytes:
        raise ValueError(
            f"a page has {geometry.payload} bytes and should have {spec.real_page_size_bytes}"
        )
    return geometry


def _pools(tensors: Sequence[KVCacheTensor]) -> Iterator[list[KVCacheTensor]]:
    """Those that are one allocation: packed ones of one `block_stride`, others each by itself."""
    packed: dict[int, list[KVCacheTensor]] = {}
    for tensor in tensors:
        if tensor.block_stride:
            packed.setdefault(tensor.block_stride, []).append(tensor)
        else:
            yield [tensor]
    yield from packed.values()


def _place(
    tensors: list[KVCacheTensor],
    num_blocks: int,
    seen: Mapping[str, RegisteredLayer],
    memory: Mapping[str, Region],
    refusal: Callable[[str, str], ValueError],
) -> tuple[Region, dict[str, RegisteredLayer]]:
    """The region of one allocation and its layers, their geometries counted from its start."""
    first_bytes = {
        name: seen[name].base + seen[name].geometry.offset - tensor.offset
        for tensor in tensors
        for name in tensor.shared_by
        if name in seen
    }
    if not first_bytes:
        raise ValueError(f"no layer of {tensors[0].shared_by} is in a KV cache group")
    start = min(first_bytes.values())
    owner = memory[min(first_bytes, key=first_bytes.__getitem__)]
    for name in first_bytes:
        if memory[name] != owner:
            raise refusal(name, "it lies outside the allocation that it shares with others")
    stride = tensors[0].block_stride
    nbytes = num_blocks * stride if stride else tensors[0].size
    if all(name in first_bytes for name in memory if memory[name] == owner):
        nbytes = owner.end - start  # Nobody else's: it may have more pages than are used.
    nbytes = min(nbytes, owner.end - start)
    region = Region(start, nbytes)
    placed: dict[str, RegisteredLayer] = {}
    for name in first_bytes:
        layer = seen[name]
        offset = layer.base + layer.geometry.offset - region.address
        geometry = replace(layer.geometry, offset=offset)
        if geometry.end > nbytes:
            raise refusal(
                name,
                f"its pages end {geometry.end} bytes from the start of an allocation of {nbytes}",
            )
        twin = next((o for o in placed.values() if _is_alias(o, layer.group, geometry)), None)
        placed[name] = replace(
            layer, base=region.address, geometry=geometry, alias_of=twin.name if twin else None
        )
    places = {
        name: LayerPlace(layer.group, layer.alias_of, layer.geometry)
        for name, layer in placed.items()
    }
    try:
        Allocation(nbytes, places).check()
    except KVCacheConflict as conflict:
        raise refusal(next(name for name in placed if name in str(conflict)), str(conflict)) from (
            conflict
        )
    return region, placed


def _is_alias(other: RegisteredLayer, group: int, geometry: KVCacheGeometry) -> bool:
    """A layer that reads another's cache has its very pages, and is in its group."""
    return other.alias_of is None and other.group == group and other.geometry.owns_like(geometry)


def _check_regions_apart(
    regions: Sequence[Region],
    layers: Mapping[str, RegisteredLayer],
    refusal: Callable[[str, str], ValueError],
) -> None:
    ordered = sorted(regions, key=lambda region: region.address)
    for one, other in zip(ordered, ordered[1:]):
        if one.end > other.address:
            mine = next(layer.name for layer in layers.values() if layer.base == one.address)
            theirs = next(layer.name for layer in layers.values() if layer.base == other.address)
            raise refusal(mine, f"its allocation reaches into that of {theirs}")


def _refusal(
    num_blocks: int,
    kv_caches: Mapping[str, torch.Tensor],
    backends: Mapping[str, type],
    cache_dtype: str,
    name: str,
    spec: KVCacheSpec,
    reason: str,
) -> ValueError:
    names = sorted({backend_name(backend) for backend in backends.values()})
    layout = "states"
    if isinstance(spec, AttentionSpec):
        found = backend_layout(backends[name], cache_dtype)
        layout = f"({', '.join(found.roles)}) in order {found.order or 'as it is'}"
    return ValueError(
        f"the KV cache of layer {name} cannot be registered: {reason}. Expected {num_blocks} "
        f"blocks of {spec.block_size} tokens; got {shape_and_stride(kv_caches[name])}. Spec "
        f"{type(spec).__name__}, backend {backend_name(backends[name])} (all: "
        f"{', '.join(names)}), layout {layout}"
    )

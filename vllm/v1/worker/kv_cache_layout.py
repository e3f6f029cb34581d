# SPDX-License-Identifier: Apache-2.0
"""The geometries of a worker's caches: as planned, without a tensor, and as tensors have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm.v1.attention.kv_cache_plan import backend_layout, observe_layer, plan_layer
from vllm.v1.kv_cache_geometry import Allocation, KVCacheGeometry, LayerLayout, LayerPlace, align
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheTensor

if TYPE_CHECKING:
    import torch

    from vllm.v1.worker.utils import AttentionGroup

_NONE_SHARED: Mapping[str, str] = MappingProxyType({})


def packing_by_layer(kv_cache_config: KVCacheConfig | None) -> dict[str, tuple[int, int]]:
    """(offset, block_stride) of the layers that lie in packed allocations."""
    tensors = kv_cache_config.kv_cache_tensors if kv_cache_config else ()
    return {
        name: (tensor.offset, tensor.block_stride)
        for tensor in tensors
        if tensor.block_stride
        for name in tensor.shared_by
    }


def observe(
    kv_cache: torch.Tensor,
    attn_group: AttentionGroup,
    cache_dtype: str,
    kernel_block_sizes: list[int],
) -> KVCacheGeometry:
    """The geometry of the cache of one of the group's layers."""
    kernel_block_size = kernel_block_sizes[attn_group.kv_cache_group_id]
    backend, spec = attn_group.backend, attn_group.kv_cache_spec
    return observe_layer(kv_cache, backend, spec, cache_dtype, kernel_block_size)


def layer_layout(
    layer: str,
    attn_group: AttentionGroup,
    geometry: KVCacheGeometry,
    cache_dtype: str,
    page_by_page: bool,
) -> LayerLayout:
    """What alignment needs to know of a layer. Recurrent layers lie page by page, always."""
    backend, spec = attn_group.backend, attn_group.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        name, page_size = backend.__qualname__, spec.page_size_bytes
        return LayerLayout(layer, name, geometry, page_size, False, page_by_page=True)
    layout = backend_layout(backend, cache_dtype)
    takes_strides, page_size = layout.takes_strides, spec.page_size_bytes
    return LayerLayout(layer, layout.name, geometry, page_size, takes_strides, page_by_page)


def plan_allocations(
    attn_groups: Iterable[AttentionGroup],
    kv_cache_config: KVCacheConfig,
    cache_dtype: str,
    kernel_block_sizes: list[int],
    shared_kv_cache_layers: Mapping[str, str] = _NONE_SHARED,
) -> list[Allocation]:
    """The allocations as the runner will make them, aligned, in the order of the config; none is
    checked.

    Raises:
        ValueError: a layer's pages do not fit, or layers cannot be aligned.
    """
    groups = {name: group for group in attn_groups for name in group.layer_names}
    pools: dict[tuple[str, int], tuple[int, dict[str, LayerPlace]]] = {}
    for number, tensor in enumerate(kv_cache_config.kv_cache_tensors):
        stride = tensor.block_stride
        key = ("packed", stride) if stride else ("tensor", number)
        nbytes = kv_cache_config.num_blocks * stride if stride else tensor.size
        _, places = pools.setdefault(key, (nbytes, {}))
        planned = _plan_tensor(tensor, nbytes, groups, cache_dtype, kernel_block_sizes)
        for name, geometry in planned.items():
            places[name] = LayerPlace(groups[name].kv_cache_group_id, None, geometry)
    for layer, target in shared_kv_cache_layers.items():
        for _, places in pools.values():
            if target in places:
                group_id = groups[layer].kv_cache_group_id
                places[layer] = LayerPlace(group_id, target, places[target].geometry)
    return [Allocation(nbytes, places) for nbytes, places in pools.values()]


def _plan_tensor(
    tensor: KVCacheTensor,
    nbytes: int,
    groups: Mapping[str, AttentionGroup],
    cache_dtype: str,
    kernel_block_sizes: list[int],
) -> dict[str, KVCacheGeometry]:
    packing = (tensor.offset, tensor.block_stride) if tensor.block_stride else None
    planned = {
        name: plan_layer(
            groups[name].backend,
            groups[name].kv_cache_spec,
            cache_dtype,
            kernel_block_sizes[groups[name].kv_cache_group_id],
            nbytes,
            packing,
        )
        for name in tensor.shared_by
    }
    if packing:
        return planned
    specs = [groups[name].kv_cache_spec for name in planned]
    beside_states = not all(isinstance(spec, AttentionSpec) for spec in specs)
    layouts = [
        layer_layout(name, groups[name], geometry, cache_dtype, beside_states)
        for name, geometry in planned.items()
    ]
    return planned | align(layouts)


def observe_allocations(
    attn_groups: Sequence[AttentionGroup],
    kv_caches: dict[str, torch.Tensor],
    cache_dtype: str,
    kernel_block_sizes: list[int],
    shared_kv_cache_layers: dict[str, str],
) -> list[Allocation]:
    """The allocations that `kv_caches` lie in, with every layer's geometry as its tensor has it."""
    sizes: dict[int, int] = {}
    places: dict[int, dict[str, LayerPlace]] = {}
    for attn_group in attn_groups:
        group_id = attn_group.kv_cache_group_id
        for name in attn_group.layer_names:
            storage = kv_caches[name].untyped_storage()
            geometry = observe(kv_caches[name], attn_group, cache_dtype, kernel_block_sizes)
            place = LayerPlace(group_id, shared_kv_cache_layers.get(name), geometry)
            sizes[storage.data_ptr()] = storage.nbytes()
            places.setdefault(storage.data_ptr(), {})[name] = place
    return [Allocation(sizes[address], layers) for address, layers in places.items()]

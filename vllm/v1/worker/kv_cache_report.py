# SPDX-License-Identifier: Apache-2.0
"""What a start would do with the KV cache: each allocation, the layers in it, and the check."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vllm.v1.attention.kv_cache_plan import plan_layer
from vllm.v1.kv_cache_geometry import (
    Allocation,
    KVCacheConflict,
    KVLayoutError,
    LayerLayout,
    LayerPlace,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, get_kv_cache_spec_kind
from vllm.v1.worker.kv_cache_layout import layer_layout, plan_allocations
from vllm.v1.worker.kv_cache_places import AllocationReport, KVCacheReport, LayerReport
from vllm.v1.worker.utils import AttentionGroup


def report_kv_cache(
    title: str,
    attn_groups: Iterable[AttentionGroup],
    kv_cache_config: KVCacheConfig,
    cache_dtype: str,
    kernel_block_sizes: list[int],
    aligned: bool = True,
) -> KVCacheReport:
    """The report of a worker's caches; makes no tensor.

    Args:
        aligned: as a start has them; otherwise each layer's cache is as its backend lays it out.

    Raises:
        ValueError: pages of a layer do not fit its allocation.
    """
    groups = {name: group for group in attn_groups for name in group.layer_names}
    reports = []
    for number, tensors in enumerate(_by_allocation(kv_cache_config.kv_cache_tensors)):
        part = dataclasses.replace(kv_cache_config, kv_cache_tensors=tensors)
        nbytes, own = _own_layouts(part, groups, cache_dtype, kernel_block_sizes)
        geometries = {name: layout.geometry for name, layout in own.items()}
        refusal = None
        if aligned:
            try:
                (planned,) = plan_allocations(
                    groups.values(), part, cache_dtype, kernel_block_sizes
                )
                geometries = {name: place.geometry for name, place in planned.layers.items()}
            except KVLayoutError as error:
                refusal = str(error)
        layers = tuple(_layer(groups[name], own[name], geometries[name]) for name in own)
        reports.append(
            AllocationReport(number, nbytes, layers, refusal or _failed_check(nbytes, layers))
        )
    return KVCacheReport(title, kv_cache_config.num_blocks, tuple(reports))


def _by_allocation(tensors: Sequence[KVCacheTensor]) -> list[list[KVCacheTensor]]:
    """Packed layers of one stride lie in one allocation, any others in their tensor's."""
    found: dict[tuple[str, int], list[KVCacheTensor]] = {}
    for number, tensor in enumerate(tensors):
        stride = tensor.block_stride
        found.setdefault(("packed", stride) if stride else ("tensor", number), []).append(tensor)
    return list(found.values())


def _own_layouts(
    config: KVCacheConfig,
    groups: Mapping[str, AttentionGroup],
    cache_dtype: str,
    kernel_block_sizes: list[int],
) -> tuple[int, dict[str, LayerLayout]]:
    """The bytes of one allocation, and its layers as each would be by itself."""
    stride = config.kv_cache_tensors[0].block_stride
    nbytes = config.num_blocks * stride if stride else config.kv_cache_tensors[0].size
    layouts = {}
    for tensor in config.kv_cache_tensors:
        packing = (tensor.offset, stride) if stride else None
        for name in tensor.shared_by:
            group = groups[name]
            size = kernel_block_sizes[group.kv_cache_group_id]
            arguments = group.backend, group.kv_cache_spec, cache_dtype, size, nbytes, packing
            layouts[name] = layer_layout(name, group, plan_layer(*arguments), cache_dtype, False)
    return nbytes, layouts


def _layer(group: AttentionGroup, own: LayerLayout, geometry: KVCacheGeometry) -> LayerReport:
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec).value
    return LayerReport(own.layer, group.kv_cache_group_id, kind, spec.block_size, own, geometry)


def _failed_check(nbytes: int, layers: Iterable[LayerReport]) -> str | None:
    places = {one.name: LayerPlace(one.group, None, one.geometry) for one in layers}
    try:
        Allocation(nbytes, places).check()
    except KVCacheConflict as conflict:
        return str(conflict)
    return None

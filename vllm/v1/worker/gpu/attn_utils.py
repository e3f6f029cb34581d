# SPDX-License-Identifier: Apache-2.0
"""The runner's KV caches: which layers share what, their allocation, views and metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layer_index import count_attention_modules
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.kv_cache_plan import backend_layout, plan_attention_cache, plan_layer
from vllm.v1.kv_cache_geometry import KVCacheGeometry, align
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.kv_cache_layout import (
    layer_layout,
    observe,
    observe_allocations,
    packing_by_layer,
)
from vllm.v1.worker.utils import AttentionGroup, bind_kv_cache, prepare_kernel_block_sizes

BLOCKS_FIRST_ROLES = ("block", "kv", "token", "head", "content")


def get_kv_cache_spec(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each layer of the model needs per page, by name, in the order the layers were made."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
    specs = {name: spec for name, spec in specs.items() if spec is not None}
    if not any(isinstance(spec, CrossAttentionSpec) for spec in specs.values()):
        return specs
    from vllm.multimodal.encoder_budget import max_encoder_tokens

    longest = max_encoder_tokens(vllm_config.model_config)
    return {
        name: dataclasses.replace(spec, max_num_encoder_tokens=longest)
        if isinstance(spec, CrossAttentionSpec) and spec.max_num_encoder_tokens is None
        else spec
        for name, spec in specs.items()
    }


def max_encoder_tokens_per_step(vllm_config: VllmConfig, specs: Iterable[KVCacheSpec]) -> int:
    """Encoder tokens that a step can have; 0 without cross-attention."""
    limits = [s.max_num_encoder_tokens for s in specs if isinstance(s, CrossAttentionSpec)]
    if not limits:
        return 0
    # A request is encoded whole, however small the budget of a step is.
    longest = max(vllm_config.model_config.max_model_len if n is None else n for n in limits)
    return max(vllm_config.scheduler_config.max_num_encoder_input_tokens, longest)


def group_layers(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> list[list[AttentionGroup]]:
    """For each KV cache group: its layers by backend, without builders of metadata."""
    layers = vllm_config.compilation_config.static_forward_context
    groups: list[list[AttentionGroup]] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        by_backend: dict[type[AttentionBackend], list[str]] = {}
        for name in group.layer_names:
            by_backend.setdefault(layers[name].get_attn_backend(), []).append(name)
        groups.append(
            [
                AttentionGroup(backend, names, group.kv_cache_spec, group_id)
                for backend, names in by_backend.items()
            ]
        )
    return groups


def init_attn_backend(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, device: torch.device
) -> tuple[list[list[AttentionGroup]], list[int]]:
    """For each KV cache group: its layers by backend, and the tokens in a kernel block."""
    groups = group_layers(kv_cache_config, vllm_config)
    kernel_block_sizes = prepare_kernel_block_sizes(kv_cache_config, groups)
    for group_id, attn_groups in enumerate(groups):
        for attn_group in attn_groups:
            attn_group.create_metadata_builders(vllm_config, device, kernel_block_sizes[group_id])
    return groups, kernel_block_sizes


def _allocate_kv_cache(
    kv_cache_config: KVCacheConfig, shared_layers: dict[str, str], device: torch.device
) -> dict[str, torch.Tensor]:
    """One zeroed int8 tensor for each allocation, under the name of every layer that uses it; those
    of packed layers (`block_stride` > 0) are one where the stride is one. `shared_layers`: layer ->
    the layer whose cache it reads."""
    raw: dict[str, torch.Tensor] = {}
    pools: dict[int, torch.Tensor] = {}
    for allocation in kv_cache_config.kv_cache_tensors:
        stride = allocation.block_stride
        tensor = pools.get(stride)
        if tensor is None:
            size = kv_cache_config.num_blocks * stride if stride else allocation.size
            tensor = current_platform.zeroed_bytes(size, device)
            if stride:
                pools[stride] = tensor
        raw.update(dict.fromkeys(allocation.shared_by, tensor))
    raw.update({layer: raw[target] for layer, target in shared_layers.items()})
    return raw


def _reshape_attention_kv_cache(
    kv_raw_tensor: torch.Tensor,
    kv_cache_spec: AttentionSpec,
    kv_cache_shape: tuple[int, ...],
    kv_cache_stride_order: tuple[int, ...],
    num_blocks: int,
    packing: tuple[int, int] | None,
    page_aligned_blocks: bool = False,
) -> torch.Tensor:
    """A raw tensor in a backend's shape.

    Args:
        num_blocks: kernel blocks, the size of exactly one dimension of the shape.
        packing: (offset, block_stride) of a packed allocation.
        page_aligned_blocks: pages lie one after the other, whatever the order says.

    Raises:
        ValueError: several dimensions may be that of the blocks, or pages do not fit.
    """
    if kv_cache_shape.count(num_blocks) != 1:
        raise ValueError(f"no telling which dimension of {kv_cache_shape} is {num_blocks} blocks")
    roles = tuple("block" if size == num_blocks else "content" for size in kv_cache_shape)
    return plan_attention_cache(
        kv_cache_spec,
        roles,
        kv_cache_shape,
        kv_cache_stride_order,
        kv_raw_tensor.numel(),
        packing,
        page_aligned_blocks,
    ).view(kv_raw_tensor)


def _reshape_kv_cache(
    attn_groups: Sequence[AttentionGroup],
    kv_cache_raw_tensors: dict[str, torch.Tensor],
    cache_dtype: str,
    kernel_block_sizes: list[int],
    shared_kv_cache_layers: dict[str, str],
    kv_cache_config: KVCacheConfig | None = None,
) -> dict[str, Any]:
    """Each layer's cache in the shape that its backend declares; those that share an allocation
    agree on which bytes a page is.

    Attention beside recurrent layers goes page by page. With a `kv_cache_config` packed layers are
    placed as it says, and mixed layouts aligned.

    Raises:
        ValueError: an allocation is no whole number of pages, layers that share one cannot be made
            to agree, or a layer reads the cache of one whose backend lays it out otherwise.
    """
    packing = packing_by_layer(kv_cache_config)
    page_aligned = _layers_beside_states(attn_groups, kv_cache_raw_tensors)
    kv_caches: dict[str, Any] = {}
    for attn_group in attn_groups:
        for name in attn_group.layer_names:
            if name in shared_kv_cache_layers:
                continue
            raw = kv_cache_raw_tensors[name]
            try:
                kv_caches[name] = plan_layer(
                    attn_group.backend,
                    attn_group.kv_cache_spec,
                    cache_dtype,
                    kernel_block_sizes[attn_group.kv_cache_group_id],
                    raw.numel(),
                    packing.get(name),
                    # With a config alignment does that, or says why it cannot.
                    kv_cache_config is None and name in page_aligned,
                ).view(raw)
            except ValueError as error:
                raise ValueError(f"KV cache of layer {name}: {error}") from error
    _check_readers(attn_groups, shared_kv_cache_layers, cache_dtype)
    kv_caches.update({layer: kv_caches[to] for layer, to in shared_kv_cache_layers.items()})
    has_attention = any(isinstance(g.kv_cache_spec, AttentionSpec) for g in attn_groups)
    if has_attention and kv_cache_config is not None:
        _align_mixed_attention_kv_cache_views(
            attn_groups, kv_caches, kernel_block_sizes, cache_dtype, kv_cache_config, page_aligned
        )
    return kv_caches


def _align_mixed_attention_kv_cache_views(
    attn_groups: Iterable[AttentionGroup],
    kv_caches: dict[str, Any],
    kernel_block_sizes: list[int],
    cache_dtype: str,
    kv_cache_config: KVCacheConfig,
    page_aligned_layers: Set[str] = frozenset(),
) -> None:
    """Makes layers that share an allocation agree on which bytes a page is, by changing strides of
    views in place: data pointers and shapes stay, no byte moves. Without a mix nothing changes.

    K/V-first beside blocks-first with a K/V dimension: those get strides `(page / 2, NB * page / 2,
    tail)` in elements, NHD and HND alike. K/V-first beside anything else, or a layer of
    `page_aligned_layers`: K/V-first goes page by page. Packed tensors are left as they are.

    Raises:
        KVLayoutError: a ValueError that names two layers, their backends and shapes, why neither
            can be given the other's strides, and what to set.
    """
    layouts = {}
    for attn_group in attn_groups:
        for name in (name for name in attn_group.layer_names if name in kv_caches):
            geometry = observe(kv_caches[name], attn_group, cache_dtype, kernel_block_sizes)
            page_aligned = name in page_aligned_layers
            layouts[name] = layer_layout(name, attn_group, geometry, cache_dtype, page_aligned)
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.block_stride > 0:
            continue
        # A layer that reads another's cache has the very same view.
        first = {id(kv_caches[name]): name for name in tensor.shared_by[::-1] if name in layouts}
        for name, geometry in align([layouts[name] for name in first.values()][::-1]).items():
            if geometry.roles == BLOCKS_FIRST_ROLES:
                _restride_blocks_first_kv_cache_to_kv_first_storage(kv_caches[name])
            else:
                geometry.restride_(kv_caches[name])


def _restride_blocks_first_kv_cache_to_kv_first_storage(kv_cache: torch.Tensor) -> None:
    """Gives a blocks-first cache `(NB, 2, ...)` of five dimensions the strides of K/V-first
    storage, in place: `(page / 2, NB * page / 2, tail)` in elements.

    Raises:
        AssertionError: it is not of that shape. A fused cache of two heads is, but for a dimension:
            the caller goes by roles, not by sizes.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) != 5 or shape[1] != 2:
        raise AssertionError(
            f"a blocks-first KV cache has five dimensions, the second of size 2, not {shape}"
        )
    geometry = KVCacheGeometry.observe(kv_cache, BLOCKS_FIRST_ROLES)
    geometry.kv_first().restride_(kv_cache)


def _layers_beside_states(
    attn_groups: Sequence[AttentionGroup], raw_tensors: dict[str, torch.Tensor]
) -> frozenset[str]:
    """Attention layers whose allocation also holds a recurrent layer's pages."""
    states = {
        raw_tensors[name].data_ptr()
        for attn_group in attn_groups
        if not isinstance(attn_group.kv_cache_spec, AttentionSpec)
        for name in attn_group.layer_names
        if name in raw_tensors
    }
    return frozenset(name for name, raw in raw_tensors.items() if raw.data_ptr() in states)


def _check_readers(
    attn_groups: Sequence[AttentionGroup], shared_layers: dict[str, str], cache_dtype: str
) -> None:
    """A layer that reads another's cache gets the other's view, and must take it for the same."""
    layouts = {
        name: backend_layout(attn_group.backend, cache_dtype)
        for attn_group in attn_groups
        if shared_layers and isinstance(attn_group.kv_cache_spec, AttentionSpec)
        for name in attn_group.layer_names
    }
    for reader, target in shared_layers.items():
        mine, theirs = layouts.get(reader), layouts.get(target)
        if mine and theirs and mine.roles != theirs.roles:
            raise ValueError(
                f"layer {reader} ({mine.name}) reads the KV cache of {target} ({theirs.name}), "
                f"whose dimensions are {', '.join(theirs.roles)}, not {', '.join(mine.roles)}; set "
                "--attention-backend to one backend for both"
            )


def init_kv_cache(
    runner_kv_caches: list[torch.Tensor],
    forward_context: dict[str, Any],
    kv_cache_config: KVCacheConfig,
    attn_groups: list[list[AttentionGroup]],
    device: torch.device,
    cache_dtype: str,
    kernel_block_sizes: list[int],
    vllm_config: VllmConfig,
) -> dict[str, Any]:
    """Allocates, shapes and binds the caches; returns them by layer name.

    Raises:
        ValueError: layers would write each other's bytes (proven for each start), or as
            `_reshape_kv_cache` and `bind_kv_cache` say.
    """
    raw = _allocate_kv_cache(kv_cache_config, {}, device)
    flat = [attn_group for groups in attn_groups for attn_group in groups]
    kv_caches = _reshape_kv_cache(flat, raw, cache_dtype, kernel_block_sizes, {}, kv_cache_config)
    for allocation in observe_allocations(flat, kv_caches, cache_dtype, kernel_block_sizes, {}):
        allocation.check()
    num_attn_module = count_attention_modules(kv_caches)
    bind_kv_cache(kv_caches, forward_context, runner_kv_caches, num_attn_module)
    return kv_caches


def build_attn_metadata(
    attn_groups: list[list[AttentionGroup]], batch: InputBatch
) -> dict[str, Any]:
    """Each layer's metadata for `batch`, made once for the layers of a group that share a backend."""
    metadata: dict[str, Any] = {}
    for group_id, groups in enumerate(attn_groups):
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens=batch.seq_lens,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=int(batch.num_scheduled_tokens.max()),
            max_seq_len=int(batch.seq_lens_np.max()),
            # Backends of plugins may count on it.
            block_table_tensor=batch.block_tables[group_id].contiguous(),
            slot_mapping=batch.slot_mappings[group_id],
            positions=batch.positions,
        )
        if groups and isinstance(groups[0].kv_cache_spec, CrossAttentionSpec):
            common = common.replace(
                seq_lens=batch.encoder_seq_lens,
                encoder_seq_lens=batch.encoder_seq_lens,
                max_seq_len=int(batch.encoder_seq_lens_np.max()),
                causal=False,
            )
        for attn_group in groups:
            built = attn_group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(attn_group.layer_names, built))
    return metadata


def build_slot_mappings_by_layer(
    slot_mappings: list[torch.Tensor], kv_cache_config: KVCacheConfig
) -> dict[str, torch.Tensor]:
    """Each layer's slots: those of its group."""
    return {
        name: slots
        for slots, group in zip(slot_mappings, kv_cache_config.kv_cache_groups, strict=True)
        for name in group.layer_names
    }

# SPDX-License-Identifier: Apache-2.0
"""The runner's KV caches: which layers share what, their allocation, views and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import exact_div
from vllm.utils.torch_utils import str_dtype_to_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup, bind_kv_cache, prepare_kernel_block_sizes


def get_kv_cache_spec(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each layer of the model needs per page, by name, in the order the layers were made."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def init_attn_backend(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, device: torch.device
) -> tuple[list[list[AttentionGroup]], list[int]]:
    """For each KV cache group: its layers by backend, and the tokens in a kernel block."""
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
    kernel_block_sizes = prepare_kernel_block_sizes(kv_cache_config, groups)
    for group_id, attn_groups in enumerate(groups):
        for attn_group in attn_groups:
            attn_group.create_metadata_builders(vllm_config, device, kernel_block_sizes[group_id])
    return groups, kernel_block_sizes


def _allocate_kv_cache(
    kv_cache_config: KVCacheConfig, shared_layers: dict[str, str], device: torch.device
) -> dict[str, torch.Tensor]:
    """One zeroed int8 tensor for each allocation, under the name of every layer that uses it.
    `shared_layers`: layer -> the layer whose cache it reads."""
    raw: dict[str, torch.Tensor] = {}
    for allocation in kv_cache_config.kv_cache_tensors:
        tensor = torch.zeros(allocation.size, dtype=torch.int8, device=device)
        raw.update(dict.fromkeys(allocation.shared_by, tensor))
    raw.update({layer: raw[target] for layer, target in shared_layers.items()})
    return raw


def _reshape_kv_cache(
    attn_groups: Sequence[AttentionGroup],
    kv_cache_raw_tensors: dict[str, torch.Tensor],
    cache_dtype: str,
    kernel_block_sizes: list[int],
    shared_kv_cache_layers: dict[str, str],
    kv_cache_config: KVCacheConfig | None = None,
) -> dict[str, Any]:
    """Each layer's cache in the shape that its backend declares.

    Raises:
        ValueError: an allocation is no whole number of pages.
    """
    kv_caches: dict[str, Any] = {}
    for attn_group in attn_groups:
        kernel_block_size = kernel_block_sizes[attn_group.kv_cache_group_id]
        for name in attn_group.layer_names:
            if name not in shared_kv_cache_layers:
                kv_caches[name] = _view_as_backend_shape(
                    kv_cache_raw_tensors[name], attn_group, kernel_block_size, cache_dtype
                )
    kv_caches.update({layer: kv_caches[to] for layer, to in shared_kv_cache_layers.items()})
    return kv_caches


def _view_as_backend_shape(
    raw: torch.Tensor, attn_group: AttentionGroup, kernel_block_size: int, cache_dtype: str
) -> torch.Tensor:
    spec, backend = attn_group.kv_cache_spec, attn_group.backend
    assert isinstance(spec, AttentionSpec)
    num_pages = exact_div(raw.numel(), spec.page_size_bytes)
    shape = backend.get_kv_cache_shape(
        num_pages * exact_div(spec.block_size, kernel_block_size),
        kernel_block_size,
        spec.num_kv_heads,
        spec.head_size,
        cache_dtype,
    )
    try:
        order = backend.get_kv_cache_stride_order()
    except NotImplementedError:
        order = tuple(range(len(shape)))
    in_memory = raw.view(str_dtype_to_torch_dtype(spec.dtype)).view([shape[d] for d in order])
    return in_memory.permute([order.index(d) for d in range(len(shape))])


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
    """Allocates, shapes and binds the caches; returns them by layer name."""
    raw = _allocate_kv_cache(kv_cache_config, {}, device)
    flat = [attn_group for groups in attn_groups for attn_group in groups]
    kv_caches = _reshape_kv_cache(
        flat, raw, cache_dtype, kernel_block_sizes, {}, kv_cache_config
    )
    bind_kv_cache(kv_caches, forward_context, runner_kv_caches)
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
            block_table_tensor=batch.block_tables[group_id],
            slot_mapping=batch.slot_mappings[group_id],
            positions=batch.positions,
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

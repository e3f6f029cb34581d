# SPDX-License-Identifier: Apache-2.0
"""What every worker does the same way, whatever its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layer_index import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.kv_cache_plan import observe_layer
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.worker.kv_cache_blocks import PageBytes, flatten, observe_blocks

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.kv_cache_geometry import KVCacheGeometry


class KVBlockZeroer:
    """Fills pages with zeros in every attention layer's cache, whatever its layout.

    Args:
        device: of the caches.
        attn_groups_iter: the layers, by backend.
        kernel_block_sizes: tokens in a kernel block, of each KV-cache group.
        cache_dtype: as in `--kv-cache-dtype`.
        static_forward_context: layer name -> layer, with its cache bound.
        runner_only_attn_layers: layers that have no cache of their own.
    """

    def __init__(
        self,
        device: torch.device,
        attn_groups_iter: Iterable[AttentionGroup],
        kernel_block_sizes: list[int],
        cache_dtype: str,
        static_forward_context: dict[str, Any],
        runner_only_attn_layers: set[str] | None = None,
    ) -> None:
        self.device = device
        self._pages = PageBytes()
        left_out = runner_only_attn_layers or set()
        for group in attn_groups_iter:
            if not isinstance(group.kv_cache_spec, AttentionSpec):
                continue  # a recurrent layer unpacks its pages itself
            kernel_block_size = kernel_block_sizes[group.kv_cache_group_id]
            for name in (name for name in group.layer_names if name not in left_out):
                kv_cache = static_forward_context[name].kv_cache
                spec = group.kv_cache_spec
                arguments = group.backend, spec, cache_dtype, kernel_block_size
                self._pages.add(kv_cache, observe_layer(kv_cache, *arguments))

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zeroes the pages of these ids.

        Raises:
            IndexError: a layer has no such page; nothing of that layer was zeroed.
        """
        if block_ids:
            self._pages.zero(block_ids)

    def warmup(self, num_kv_blocks: int) -> None:
        """Runs once over page 0, which is never handed out."""
        if num_kv_blocks > 0:
            self.zero_block_ids([0])


@dataclass
class AttentionGroup:
    """Layers of one KV-cache group that run on one backend, and what makes their metadata."""

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    metadata_builders: list[AttentionMetadataBuilder] = field(default_factory=list)

    def create_metadata_builders(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        kernel_block_size: int | None = None,
        num_metadata_builders: int = 1,
    ) -> None:
        """Makes the builders, one for each micro-batch that may be in flight.

        Args:
            kernel_block_size: tokens per kernel block, where smaller than a page: builders get
                the spec of a kernel block.
        """
        spec = self.kv_cache_spec
        if kernel_block_size is not None:
            spec = spec.copy_with_new_block_size(kernel_block_size)
        builder_cls = self.backend.get_builder_cls()
        self.metadata_builders = [
            builder_cls(spec, self.layer_names, vllm_config, device)
            for _ in range(num_metadata_builders)
        ]

    def get_metadata_builder(self, ubatch_id: int = 0) -> AttentionMetadataBuilder:
        """The builder of micro-batch `ubatch_id`."""
        return self.metadata_builders[ubatch_id]


def select_common_block_size(
    kv_manager_block_size: int, backends: list[type[AttentionBackend]]
) -> int:
    """Tokens per kernel block for a group of layers: the most that every backend takes.

    Args:
        kv_manager_block_size: tokens per page; a page is a whole number of kernel blocks.
        backends: the backends of the group's layers.

    Raises:
        ValueError: no size divides the page and suits all; says what each backend takes.
    """
    for size in range(kv_manager_block_size, 0, -1):
        if kv_manager_block_size % size == 0 and all(_takes(b, size) for b in backends):
            return size
    taken = (f"{b.get_name()} takes {b.get_supported_kernel_block_sizes()}" for b in backends)
    raise ValueError(
        f"a page of {kv_manager_block_size} tokens cannot be cut into kernel blocks: "
        f"{', '.join(taken)}. Set --block-size to a multiple that suits all"
    )


def _takes(backend: type[AttentionBackend], block_size: int) -> bool:
    return any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size
        for size in backend.get_supported_kernel_block_sizes()
    )


def prepare_kernel_block_sizes(
    kv_cache_config: KVCacheConfig, attn_groups: list[list[AttentionGroup]]
) -> list[int]:
    """Tokens per kernel block of each KV-cache group.

    Args:
        kv_cache_config: the groups.
        attn_groups: for each KV-cache group its attention groups.
    """
    sizes = []
    for group_id, kv_cache_group in enumerate(kv_cache_config.kv_cache_groups):
        spec = kv_cache_group.kv_cache_spec
        backends = [group.backend for group in attn_groups[group_id]]
        is_attention = isinstance(spec, AttentionSpec)
        # A recurrent state is not cut up.
        size = select_common_block_size(spec.block_size, backends) if is_attention else None
        sizes.append(size or spec.block_size)
    return sizes


def copy_kv_cache_blocks_inplace(
    kv_caches: Iterable[torch.Tensor | list[torch.Tensor]],
    num_blocks: int,
    kv_cache_block_copies: Sequence[KVCacheBlockCopy],
    geometries: Sequence[KVCacheGeometry] | None = None,
) -> None:
    """Copies pages in every cache: each destination gets what its source held before.

    Args:
        num_blocks: pages of a cache.
        geometries: of each cache, lists of caches flattened, offsets from the storage's start. Left
            out: each cache must have one dimension, and no more, that can be its blocks.

    Raises:
        ValueError: no telling which dimension is the blocks, or a page is written twice.
        IndexError: there is no such page.
    """
    destinations = [copy.dst_block_id for copy in kv_cache_block_copies]
    if len(set(destinations)) != len(destinations):
        raise ValueError(f"a page is the destination of two copies: {destinations}")
    if not destinations:
        return
    caches = flatten(kv_caches)
    if geometries is None:
        geometries = [observe_blocks(cache, num_blocks) for cache in caches]
    pages = PageBytes()
    for cache, geometry in zip(caches, geometries, strict=True):
        pages.add(cache, geometry)
    pages.copy([copy.src_block_id for copy in kv_cache_block_copies], destinations)


def bind_kv_cache(
    kv_caches: dict[str, torch.Tensor],
    forward_context: dict[str, Any],
    runner_kv_caches: list[torch.Tensor],
    num_attn_module: int = 1,
) -> None:
    """Gives each layer its KV cache, and the runner all of them in layer order.

    Layers are ordered by the index in their names (2 before 10), those of one index as they stand
    in `kv_caches`; a layer whose name has no index comes last. Either all are bound or none.

    Args:
        kv_caches: layer name -> its KV cache.
        forward_context: layer name -> layer, at least those of `kv_caches`.
        runner_kv_caches: an empty list, filled with the caches in layer order.
        num_attn_module: attention modules in each layer, see `extract_layer_index`.

    Raises:
        NotImplementedError: several layers have one index and the platform did not declare its
            runner fit for that.
        ValueError: `runner_kv_caches` is not empty, or a layer is not in `forward_context`.
    """
    if runner_kv_caches:
        raise ValueError(f"{len(runner_kv_caches)} KV caches are bound already; clear them first")
    unknown = [name for name in kv_caches if name not in forward_context]
    if unknown:
        raise ValueError(f"KV caches of layers that the model does not have: {', '.join(unknown)}")
    by_index = _layers_by_index(kv_caches, num_attn_module)
    for index, layer_names in by_index.items():
        if len(layer_names) > 1:
            _require_multi_layer_support(index, layer_names)
    for layer_name in (name for layer_names in by_index.values() for name in layer_names):
        runner_kv_caches.append(kv_caches[layer_name])
        _bind_layer(forward_context[layer_name], kv_caches[layer_name])


def _layers_by_index(
    layer_names: Iterable[str], num_attn_module: int
) -> dict[int | None, list[str]]:
    """Layer names by index, in order of the indices; None, for names without one, is last."""
    by_index: dict[int | None, list[str]] = {}
    for name in layer_names:
        has_index = any(part.isdecimal() for part in name.split("."))
        index = extract_layer_index(name, num_attn_module) if has_index else None
        by_index.setdefault(index, []).append(name)
    return dict(sorted(by_index.items(), key=lambda item: (item[0] is None, item[0] or 0)))


def _require_multi_layer_support(index: int | None, layer_names: list[str]) -> None:
    """Asks the platform whether its runner takes several caches of one index."""
    try:
        current_platform.check_runner_kv_caches_multi_layer()
    except NotImplementedError as refusal:
        platform_cls = type(current_platform)
        where = "No layer index stands" if index is None else f"Layer index {index} stands"
        raise NotImplementedError(
            f"{refusal} {where} in the names of {len(layer_names)} layers: "
            f"{', '.join(layer_names)}. The platform is {current_platform.device_name!r} "
            f"({platform_cls.__module__}.{platform_cls.__qualname__}). If its runner reads KV "
            "caches by layer name, override the classmethod check_runner_kv_caches_multi_layer "
            "there with one that does nothing."
        ) from refusal


def _bind_layer(layer: Any, kv_cache: torch.Tensor) -> None:
    """Layers of models from elsewhere may be plain objects that only hold their cache."""
    bind = getattr(layer, "bind_kv_cache", None)
    if bind is not None:
        bind(kv_cache)
    else:
        layer.kv_cache = kv_cache

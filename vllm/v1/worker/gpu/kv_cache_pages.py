# SPDX-License-Identifier: Apache-2.0
"""What a step asks of pages before it runs: zeros, or another page's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_geometry import KVCacheGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.kv_cache_layout import observe
from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer, copy_kv_cache_blocks_inplace


class KVCachePages:
    """The pages of the runner's caches, which are bound to their layers. Where they lie is looked
    up when a step first asks for something."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        attn_groups: Sequence[Sequence[AttentionGroup]],
        kernel_block_sizes: list[int],
    ) -> None:
        self._layers = vllm_config.compilation_config.static_forward_context
        self._cache_dtype = vllm_config.cache_config.cache_dtype
        self._num_pages = kv_cache_config.num_blocks
        self._attn_groups = [group for groups in attn_groups for group in groups]
        self._kernel_block_sizes = kernel_block_sizes

    def prepare(self, step: SchedulerOutput) -> None:
        """Zeroes, then copies: a page that is handed out as a copy is to hold the copy.

        Raises:
            IndexError: there is no such page.
            ValueError: a page is the destination of two copies.
        """
        if step.new_block_ids_to_zero:
            self._zeroer.zero_block_ids(step.new_block_ids_to_zero)
        if step.kv_cache_block_copies:
            caches = [self._layers[name].kv_cache for name in self._geometries]
            geometries = list(self._geometries.values())
            copies = step.kv_cache_block_copies
            copy_kv_cache_blocks_inplace(caches, self._num_pages, copies, geometries)

    @cached_property
    def _zeroer(self) -> KVBlockZeroer:
        return KVBlockZeroer(
            self._layers[self._attn_groups[0].layer_names[0]].kv_cache.device,
            self._attn_groups,
            self._kernel_block_sizes,
            self._cache_dtype,
            self._layers,
        )

    @cached_property
    def _geometries(self) -> dict[str, KVCacheGeometry]:
        return {
            name: observe(
                self._layers[name].kv_cache, group, self._cache_dtype, self._kernel_block_sizes
            )
            for group in self._attn_groups
            for name in group.layer_names
        }

# SPDX-License-Identifier: Apache-2.0
"""The block tables of all KV cache groups as one: every group's manager in step with the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from vllm.v1.core.block_hash import BlockHashList, resolve_block_hashes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    CacheHit,
    CrossAttentionManager,
    SingleTypeKVCacheManager,
    get_manager_class,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request


class KVCacheCoordinator(ABC):
    """One manager for each group, over one pool.

    Args:
        max_in_flight_tokens: the most tokens of one request that are computed at once.
        scheduler_block_size: prefix hits are multiples of it: common to all groups.
        hash_block_size: tokens behind each of a request's block hashes.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        enable_caching: bool,
        scheduler_block_size: int,
        hash_block_size: int,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.block_pool = BlockPool(kv_cache_config.num_blocks, enable_caching, hash_block_size)
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            get_manager_for_kv_cache_spec(
                group.kv_cache_spec,
                max_in_flight_tokens,
                max_model_len,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=group_id,
                needs_kv_cache_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            )
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )

        self.cross_attention_managers = [
            m for m in self.single_type_managers if isinstance(m, CrossAttentionManager)
        ]

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self.single_type_managers)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that are used up, over all groups: see `SingleTypeKVCacheManager`."""
        return sum(
            manager.get_num_blocks_to_allocate(
                request_id,
                manager.num_slots(num_tokens, num_encoder_tokens),
                new_computed_blocks[group_id],
                total_computed_tokens,
                apply_admission_cap,
            )
            for group_id, manager in enumerate(self.single_type_managers)
        )

    def get_peak_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at once, over all groups."""
        return sum(
            manager.get_peak_blocks(num_tokens, num_encoder_tokens)
            for manager in self.single_type_managers
        )

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begins the request's tables: blocks found in the prefix cache, and room for the tokens
        that a connector brings."""
        # All hits are held before any block is handed out: a hit may be the oldest free block.
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks):
            manager.add_local_computed_blocks(request_id, blocks)
        if num_external_computed_tokens:
            for manager in self.single_type_managers:
                manager.allocate_external_computed_blocks(
                    request_id, num_local_computed_tokens, num_external_computed_tokens
                )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_encoder_tokens: int = 0
    ) -> tuple[list[KVCacheBlock], ...]:
        """Extends the request's tables to `num_tokens` tokens; returns the blocks added."""
        return tuple(
            manager.allocate_new_blocks(
                request_id, manager.num_slots(num_tokens, num_encoder_tokens)
            )
            for manager in self.single_type_managers
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes the content of the request's full blocks known, up to that many tokens."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens)

    def find_encoder_blocks(
        self, request: Request, num_encoder_tokens: int
    ) -> dict[int, list[KVCacheBlock]] | None:
        """By cross-attention group, the blocks that hold keys and values of the request's encoder
        output; None if a group lacks some of them."""
        found = {}
        for manager in self.cross_attention_managers:
            blocks = manager.find_encoder_blocks(request, num_encoder_tokens)
            if blocks is None:
                return None
            found[manager.kv_cache_group_id] = blocks
        return found or None

    def cache_encoder_blocks(self, request: Request) -> None:
        """Makes the request's cross-attention blocks known."""
        for manager in self.cross_attention_managers:
            manager.cache_encoder_blocks(request)

    def free(self, request_id: str) -> None:
        """Ends the request's tables and gives its blocks back, the tail first."""
        self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Ends the request's tables; returns its blocks in the order they are to be freed in: the
        tails of all groups first. One group's beginning is worth nothing without the others'."""
        tables = [m.pop_blocks_for_free(request_id) for m in self.single_type_managers]
        return [block for blocks in zip_longest(*tables) for block in blocks if block is not None]

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """Gives back the blocks that no token after `processed_computed_tokens` looks at."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, processed_computed_tokens)

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's table in each group."""
        return tuple(m.req_to_blocks.get(request_id, []) for m in self.single_type_managers)

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since this was last called; each once."""
        taken = (block for m in self.single_type_managers for block in m.take_new_block_ids())
        return list(dict.fromkeys(taken))

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds, over all groups."""
        return sum(manager.num_held_blocks(request_id) for manager in self.single_type_managers)

    def count_holders(self) -> Counter[int]:
        """Block id -> places in block tables."""
        num_holders: Counter[int] = Counter()
        for manager in self.single_type_managers:
            manager.count_holders(num_holders)
        return num_holders

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> CacheHit:
        """The longest beginning that is in the cache for every group, at most
        `max_cache_hit_length` tokens: its blocks in each group, and its tokens."""


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Nothing is ever found: prefix caching is off, or no group supports it."""

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> CacheHit:
        return tuple([] for _ in self.single_type_managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its hit is the hit."""

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> CacheHit:
        manager = self.single_type_managers[0]
        return manager.find_longest_cache_hit(
            resolve_block_hashes(block_hashes, self.hash_block_size, manager.block_size),
            max_cache_hit_length,
            [0],
            self.block_pool,
            manager.kv_cache_spec,
            self.scheduler_block_size,
        )


class SpecGroup(NamedTuple):
    """Groups with the same spec: looked up together."""

    spec: KVCacheSpec
    group_ids: list[int]
    manager_cls: type[SingleTypeKVCacheManager]


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups, of one or more kinds."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        enable_caching: bool,
        scheduler_block_size: int,
        hash_block_size: int,
    ) -> None:
        super().__init__(
            kv_cache_config,
            max_model_len,
            max_in_flight_tokens,
            enable_caching,
            scheduler_block_size,
            hash_block_size,
        )
        self.spec_groups = _split_by_spec(kv_cache_config)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> CacheHit:
        """Each kind in turn may shorten the hit, which may shorten that of a kind before it (a
        window that ends earlier needs other pages), until none does. A length never grows, so this
        ends."""
        found: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        length = max_cache_hit_length
        shortened = True
        while shortened and length > 0:
            shortened = False
            for group in self.spec_groups:
                blocks, hit = self._find_in(group, block_hashes, length)
                for group_id, group_blocks in zip(group.group_ids, blocks):
                    found[group_id] = group_blocks
                shortened |= hit < length
                length = hit
        if length == 0:
            return tuple([] for _ in found), 0
        return tuple(found), length

    def _find_in(
        self, group: SpecGroup, block_hashes: list[BlockHash], max_length: int
    ) -> CacheHit:
        hashes: BlockHashList = resolve_block_hashes(
            block_hashes, self.hash_block_size, group.spec.block_size
        )
        return group.manager_cls.find_longest_cache_hit(
            hashes,
            max_length,
            group.group_ids,
            self.block_pool,
            group.spec,
            self.scheduler_block_size,
        )


def _split_by_spec(kv_cache_config: KVCacheConfig) -> list[SpecGroup]:
    """Groups that can be found by a prefix, by spec. Full attention comes first: its look-up stops
    at the first miss and bounds the others, which search from the end."""
    split: dict[KVCacheSpec, SpecGroup] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        manager_cls = get_manager_class(spec)
        if manager_cls.supports_prefix_caching:
            split.setdefault(spec, SpecGroup(spec, [], manager_cls)).group_ids.append(group_id)
    return sorted(split.values(), key=lambda g: not isinstance(g.spec, FullAttentionSpec))


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    max_model_len: int,
    max_in_flight_tokens: int,
    enable_caching: bool,
    scheduler_block_size: int,
    hash_block_size: int,
) -> KVCacheCoordinator:
    """The coordinator for that cache."""
    cls: type[KVCacheCoordinator] = HybridKVCacheCoordinator
    if not enable_caching or not _split_by_spec(kv_cache_config):
        cls = KVCacheCoordinatorNoPrefixCache
    elif len(kv_cache_config.kv_cache_groups) == 1:
        cls = UnitaryKVCacheCoordinator
    return cls(
        kv_cache_config,
        max_model_len,
        max_in_flight_tokens,
        enable_caching,
        scheduler_block_size,
        hash_block_size,
    )

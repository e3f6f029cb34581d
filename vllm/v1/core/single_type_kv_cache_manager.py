# SPDX-License-Identifier: Apache-2.0
"""Block tables of one KV cache group: which blocks a request holds, for one kind of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_hash import BlockHashList, encoder_block_hashes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_block import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

CacheHit = tuple[tuple[list[KVCacheBlock], ...], int]
"""Blocks found, a list for each group, and the tokens they hold."""


class SingleTypeKVCacheManager(ABC):
    """The blocks of every request in one group.

    `req_to_blocks[request_id][i]` holds tokens `[i * block_size, (i + 1) * block_size)`; the null
    block stands where a page is no longer needed. Such places are always the first ones.

    Args:
        max_admission_blocks_per_request: the most blocks a request can hold at once, however long
            it is; None: as many as its tokens fill.
        needs_kv_cache_zeroing: remember the blocks handed out, for `take_new_block_ids`.
    """

    supports_prefix_caching: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        needs_kv_cache_zeroing: bool = False,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self._needs_zeroing = needs_kv_cache_zeroing
        self._new_block_ids: list[int] = []

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that are used up when the request grows to `num_tokens`.

        Args:
            num_tokens: tokens that need a slot, those computed already among them.
            new_computed_blocks: blocks found in the prefix cache but not yet held. Those that
                nobody holds count: they leave the free queue.
            total_computed_tokens: tokens whose keys and values are there already.
            apply_admission_cap: count what the request holds at its peak on the way to
                `num_tokens`, rather than for getting there in one step.
        """
        blocks = self.req_to_blocks.get(request_id, ())
        num_known = len(blocks) + len(new_computed_blocks)
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        num_new = max(0, cdiv(num_tokens, self.block_size) - max(num_known, num_skipped))
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            num_live = max(0, num_known - num_skipped)
            num_new = min(num_new, max(0, self.max_admission_blocks_per_request - num_live))
        if new_computed_blocks:
            num_new += sum(not b.is_null and b.ref_cnt == 0 for b in new_computed_blocks)
        return num_new

    def get_peak_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at once."""
        num_blocks = cdiv(self.num_slots(num_tokens, num_encoder_tokens), self.block_size)
        cap = self.max_admission_blocks_per_request
        return num_blocks if cap is None else min(num_blocks, cap)

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Tokens that this group keeps, of a request's own and of its encoder inputs'."""
        return num_tokens

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Begins the request's table with blocks found in the prefix cache."""
        if not new_computed_blocks:
            return
        if request_id in self.req_to_blocks:
            raise ValueError(f"request {request_id} has blocks already; hits come first")
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id] = list(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Gives blocks to tokens that a connector will fill, behind the local ones; those that the
        next token does not see get the null block."""
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        blocks = self.req_to_blocks.setdefault(request_id, [])
        num_skipped = self.get_num_skipped_tokens(num_tokens) // self.block_size
        blocks.extend([self.block_pool.null_block] * (num_skipped - len(blocks)))
        self.allocate_new_blocks(request_id, num_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Extends the request's table to `num_tokens` tokens; returns the blocks added."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        num_new = cdiv(num_tokens, self.block_size) - len(blocks)
        if num_new <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new)
        blocks.extend(new_blocks)
        if self._needs_zeroing:
            self._new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since this was last called, whose bytes are somebody else's still."""
        taken, self._new_block_ids = self._new_block_ids, []
        return taken

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Makes the content of the request's full blocks known, up to `num_tokens` tokens."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        num_full = num_tokens // self.block_size
        if num_full <= num_cached:
            return
        self.block_pool.cache_full_blocks(
            request,
            self.req_to_blocks[request.request_id],
            num_cached,
            num_full,
            self.block_size,
            self.kv_cache_group_id,
        )
        self.num_cached_block[request.request_id] = num_full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Ends the request's table; returns its blocks in the order in which they are to be freed:
        the tail first, since a beginning is found again more often than an end."""
        self.num_cached_block.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])[::-1]

    def free(self, request_id: str) -> None:
        """Ends the request's table and gives its blocks back."""
        self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """Gives back the blocks that no token after `processed_computed_tokens` looks at."""
        num_skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        if num_skipped == 0:
            return
        blocks = self.req_to_blocks.get(request_id, [])
        removed = []
        for index in reversed(range(min(num_skipped, len(blocks)))):
            if blocks[index].is_null:
                break
            removed.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(removed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many of the first tokens the token at `num_computed_tokens` and all after it do not
        look at."""
        return 0

    def count_holders(self, num_holders: Counter[int]) -> None:
        """Adds one to `num_holders[block_id]` for each place of a block in a table."""
        for blocks in self.req_to_blocks.values():
            num_holders.update(block.block_id for block in blocks if not block.is_null)

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds."""
        return sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        alignment_tokens: int,
    ) -> CacheHit:
        """The longest beginning of a request that is in the cache for all the groups.

        Args:
            block_hashes: over blocks of the groups' size.
            max_length: tokens; the hit is no longer.
            kv_cache_group_ids: groups of the same spec.
            alignment_tokens: the hit is a multiple of it.
        """


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token looks at all before it: blocks are held to the request's end."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        alignment_tokens: int,
    ) -> CacheHit:
        block_size = kv_cache_spec.block_size
        found: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for index in range(min(max_length // block_size, len(block_hashes))):
            cached = block_pool.get_cached_block(block_hashes[index], kv_cache_group_ids)
            if cached is None:
                break
            for blocks, block in zip(found, cached):
                blocks.append(block)
        length = len(found[0]) * block_size // alignment_tokens * alignment_tokens
        for blocks in found:
            del blocks[length // block_size :]
        return found, length


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Each token looks at itself and the `sliding_window - 1` before it: pages that have slid out
    are given back, and a prefix hit needs only the pages that its next token looks at."""

    def __init__(self, kv_cache_spec: SlidingWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.sliding_window = kv_cache_spec.sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        alignment_tokens: int,
    ) -> CacheHit:
        """Looks from the end for a run of blocks that fills the window, or reaches the beginning:

        blocks      0     1     2     3     4     5          (window of 3 blocks)
        cached      x     x           x     x     x
        hit       null  null  null    3     4     5
        """
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        block_size = kv_cache_spec.block_size
        window_blocks = max(1, cdiv(kv_cache_spec.sliding_window - 1, block_size))
        run: list[list[KVCacheBlock]] = []
        start = min(max_length // block_size, len(block_hashes))
        while start > 0 and len(run) < window_blocks:
            if not run and start * block_size % alignment_tokens:
                start -= 1
                continue
            start -= 1
            cached = block_pool.get_cached_block(block_hashes[start], kv_cache_group_ids)
            if cached is None:
                run = []
            else:
                run.append(cached)
        nulls = [block_pool.null_block] * start
        found = tuple(
            nulls + [blocks[i] for blocks in reversed(run)] for i in range(len(kv_cache_group_ids))
        )
        return (found, (start + len(run)) * block_size) if run else (_nothing(found), 0)


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Keys and values of the encoder's output: pages for its tokens, from the request's first step
    to its end. Requests with the same encoder input hold the same pages; they are found by the
    input, all or none, and by no prefix of the decoder's.

    Without prefix caching they are found only as long as somebody holds them.
    """

    supports_prefix_caching: ClassVar[bool] = False

    def num_slots(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return num_encoder_tokens

    def find_encoder_blocks(
        self, request: Request, num_encoder_tokens: int
    ) -> list[KVCacheBlock] | None:
        """The blocks of its encoder output, not yet held; None if not all of them are there."""
        blocks = []
        num_blocks = cdiv(num_encoder_tokens, self.block_size)
        for block_hash in encoder_block_hashes(request, num_blocks):
            found = self.block_pool.get_cached_block(block_hash, [self.kv_cache_group_id])
            if found is None:
                return None
            blocks += found
        return blocks

    def cache_encoder_blocks(self, request: Request) -> None:
        """Makes the request's blocks known, which this step fills."""
        blocks = self.req_to_blocks[request.request_id]
        for block, block_hash in zip(blocks, encoder_block_hashes(request, len(blocks))):
            if block.block_hash is None:
                key = make_block_hash_with_group_id(block_hash, self.kv_cache_group_id)
                self.block_pool.cache_block(block, key)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        if not self.enable_caching:
            self.block_pool.evict_blocks({b.block_id for b in blocks if b.ref_cnt == 1})
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Nothing: the hashes are those of decoder tokens. See `cache_encoder_blocks`."""

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Nothing: the tokens are the decoder's."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        alignment_tokens: int,
    ) -> CacheHit:
        raise NotImplementedError("cross-attention pages are not found by a prefix")


def _nothing(groups: tuple[list[KVCacheBlock], ...]) -> tuple[list[KVCacheBlock], ...]:
    return tuple([] for _ in groups)


# The first that fits is taken.
_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    CrossAttentionSpec: CrossAttentionManager,
}


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager for groups of that spec.

    Raises:
        ValueError: there is none.
    """
    for spec_cls, manager_cls in _MANAGERS.items():
        if isinstance(kv_cache_spec, spec_cls):
            return manager_cls
    supported = ", ".join(spec_cls.__name__ for spec_cls in _MANAGERS)
    raise ValueError(
        f"no block manager for a {type(kv_cache_spec).__name__}; supported: {supported}"
    )


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec, max_in_flight_tokens: int, max_model_len: int, **kwargs: Any
) -> SingleTypeKVCacheManager:
    """A manager for a group of that spec.

    Args:
        max_in_flight_tokens: the most tokens of one request that are computed at once.
        kwargs: the manager's own arguments.

    Raises:
        ValueError: no manager takes such a spec.
    """
    if isinstance(kv_cache_spec, SlidingWindowSpec):
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.max_admission_blocks_per_request(
            max_in_flight_tokens, max_model_len
        )
    return get_manager_class(kv_cache_spec)(kv_cache_spec=kv_cache_spec, **kwargs)

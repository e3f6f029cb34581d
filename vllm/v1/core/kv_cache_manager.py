# SPDX-License-Identifier: Apache-2.0
"""The KV cache as the scheduler asks for it: find a prefix, get room for tokens, give it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request


@dataclass
class KVCacheBlocks:
    """Blocks of one request: `blocks[group_id]` are those in that KV cache group."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: Literal[True] = True) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids, a list for each group. None if there is no block at all and `allow_none`."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the only group's blocks whose content is not known.

        Raises:
            ValueError: there are several groups.
        """
        if len(self.blocks) != 1:
            raise ValueError(f"{len(self.blocks)} KV cache groups; expected one")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of the blocks whose content is not known, a list for each group."""
        return [
            [b.block_id for b in group if b.block_hash is None and not b.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, in as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.blocks))


class KVCacheManager:
    """Block tables of all requests.

    Args:
        scheduler_block_size: prefix hits are multiples of it.
        hash_block_size: tokens behind each of a request's block hashes.
        max_in_flight_tokens: the most tokens of one request that are computed at once; None:
            `max_model_len`.
        watermark: share of the pages that an admission leaves free for requests already running.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        log_stats: bool = False,
        watermark: float = 0.0,
    ) -> None:
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            max_model_len,
            max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            enable_caching,
            scheduler_block_size,
            hash_block_size,
        )
        self.block_pool = self.coordinator.block_pool
        self.watermark_blocks = int(watermark * self.block_pool.num_usable_blocks)
        self.prefix_cache_stats = PrefixCacheStats()
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in self.single_type_managers))

    @property
    def single_type_managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """The manager of each group."""
        return self.coordinator.single_type_managers

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Look-ups since this was last called; None if stats are off."""
        if not self.log_stats:
            return None
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        return stats

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether the request may take pages that others have computed."""
        return self.enable_caching and not request.get_skip_reading_prefix_cache()

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Counts the look-up of a request that was admitted with `num_hits` tokens found. One that
        was preempted, or goes on with a beam, finds its own pages: that is no hit."""
        if self.log_stats and request.num_preemptions == 0 and request.num_output_tokens == 0:
            self.prefix_cache_stats.record(request.num_tokens, num_hits)

    def with_encoder_blocks(
        self, request: Request, num_encoder_tokens: int, found: KVCacheBlocks
    ) -> KVCacheBlocks | None:
        """`found` and the blocks, not yet held, in which another request with the same encoder
        inputs has left its keys and values; None: there are none, so the inputs must be encoded."""
        by_group = self.coordinator.find_encoder_blocks(request, num_encoder_tokens)
        if by_group is None:
            return None
        return KVCacheBlocks(tuple(by_group.get(i, own) for i, own in enumerate(found.blocks)))

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The request's longest beginning in the prefix cache: its blocks, not yet held, and its
        tokens. Never the whole request: the last token is always computed, for its logits. Blocks
        of encoder output are not among them, see `with_encoder_blocks`."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0
        blocks, num_tokens = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return (KVCacheBlocks(blocks) if num_tokens else self.empty_kv_cache_blocks), num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Room for the next `num_new_tokens` tokens of the request.

            | computed | new computed | external computed | new | lookahead |
                       |  found in the cache and held     | blocks added    |

        Args:
            num_new_computed_tokens, new_computed_blocks: what `get_computed_blocks` found.
            num_lookahead_tokens: further slots, whose content is not cached.
            num_external_computed_tokens: tokens that a connector brings. Then blocks of encoder
                output are not made known yet: a connector fills those that are not.
            delay_cache_blocks: do not make full blocks known: their content is still on its way.
            num_encoder_tokens: tokens of the encoder's output; given with the first step. Blocks for
                them that are not among `new_computed_blocks` are taken to be filled by that step.
            full_sequence_must_fit: refuse unless the request as it now stands fits to its end, not
                only this step's share.
            reserved_blocks: free blocks that are promised to others (admission only).
            has_scheduled_reqs: requests are running, so the watermark is kept (admission only).

        Returns:
            The blocks added, those found in the cache not among them; None if there is no room.
            Then nothing has changed, but for pages that slid out of a window.
        """
        if num_new_tokens + num_external_computed_tokens <= 0:
            raise ValueError(f"room for {num_new_tokens} tokens was asked for")
        request_id = request.request_id
        hits = (new_computed_blocks or self.empty_kv_cache_blocks).blocks
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_computed = num_local + num_external_computed_tokens
        self.coordinator.remove_skipped_blocks(request_id, num_computed)

        num_free = self.block_pool.get_num_free_blocks()
        if full_sequence_must_fit:
            num_free -= reserved_blocks + (self.watermark_blocks if has_scheduled_reqs else 0)
            num_needed = self.coordinator.get_num_blocks_to_allocate(
                request_id,
                request.num_tokens,
                hits,
                num_encoder_tokens,
                num_computed,
                apply_admission_cap=True,
            )
            if num_needed > num_free:
                return None
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_needed = self.coordinator.get_num_blocks_to_allocate(
            request_id, num_slots, hits, num_encoder_tokens, num_computed
        )
        if num_needed > num_free:
            return None

        if any(hits) or num_external_computed_tokens:
            self.coordinator.allocate_new_computed_blocks(
                request_id, hits, num_local, num_external_computed_tokens
            )
        new_blocks = self.coordinator.allocate_new_blocks(request_id, num_slots, num_encoder_tokens)
        if self.enable_caching and not delay_cache_blocks:
            # Known before they are computed: a step writes all its keys and values before it reads
            # any, so that requests of one step can share them. Lookahead tokens are guesses.
            known_tokens = min(num_computed + num_new_tokens, request.num_tokens)
            self.coordinator.cache_blocks(request, known_tokens)
        if num_encoder_tokens and not delay_cache_blocks and not num_external_computed_tokens:
            self.coordinator.cache_encoder_blocks(request)
        return KVCacheBlocks(new_blocks)

    def free(self, request: Request) -> None:
        """Gives the request's blocks back. Their content can be found until they are reused."""
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Ends the request's tables; its blocks stay held until `block_pool.free_blocks`."""
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """Gives back the blocks that no token after `processed_computed_tokens` looks at."""
        self.coordinator.remove_skipped_blocks(request_id, processed_computed_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes the request's full blocks known, after `delay_cache_blocks`."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)
        if request.has_encoder_inputs:
            self.coordinator.cache_encoder_blocks(request)

    def cache_encoder_blocks(self, request: Request) -> None:
        """Makes the blocks of the request's encoder output known, which a connector fills."""
        self.coordinator.cache_encoder_blocks(request)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forgets the content of these blocks."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all content; False if requests hold blocks."""
        done = self.block_pool.reset_prefix_cache()
        self.prefix_cache_stats.reset |= done
        return done

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of the request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of all blocks of the request, a list for each group."""
        return self.get_blocks(request_id).get_block_ids()

    def create_kv_cache_blocks(self, blocks: tuple[list[KVCacheBlock], ...]) -> KVCacheBlocks:
        """`blocks`, or the shared empty value."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since this was last called, to be zeroed before the step runs. Empty if
        the cache needs no zeroing."""
        return self.coordinator.take_new_block_ids()

    def can_ever_hold(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Whether a request of `num_tokens` tokens, computed from the start, fits into the pool
        with nobody beside it."""
        peak = self.coordinator.get_peak_blocks(num_tokens, num_encoder_tokens)
        return peak <= self.block_pool.num_usable_blocks

    def fits_alone(self, request: Request, num_new_tokens: int) -> bool:
        """Whether a running request for whose next tokens there is no room would find some if
        nobody else held a page."""
        num_held = self.coordinator.num_held_blocks(request.request_id)
        num_needed = self.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            min(request.num_computed_tokens + num_new_tokens, self.max_model_len),
            self.empty_kv_cache_blocks.blocks,
            0,
            request.num_computed_tokens,
        )
        return num_held + num_needed <= self.block_pool.num_usable_blocks

    def num_blocks_to_complete(self, request: Request, num_encoder_tokens: int = 0) -> int:
        """Free blocks that a running request still takes until all its tokens so far are
        computed."""
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            request.num_tokens,
            self.empty_kv_cache_blocks.blocks,
            num_encoder_tokens,
            request.num_computed_tokens,
            apply_admission_cap=True,
        )

    def check_integrity(self) -> None:
        """Checks the books against each other, in time proportional to the pool.

        Raises:
            KVCacheIntegrityError: they contradict each other.
        """
        self.block_pool.check_integrity(self.coordinator.count_holders())

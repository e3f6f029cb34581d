# SPDX-License-Identifier: Apache-2.0
"""The pages of the KV cache: who holds them, which are free, what content can be found again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.block_hash import BlockHashListWithBlockSize
from vllm.v1.core.kv_cache_block import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)


class KVCacheIntegrityError(RuntimeError):
    """The books of the block pool contradict each other: a bug, never a user's mistake."""


class BlockHashToBlockMap:
    """Content -> the blocks that hold it.

    Two requests that compute the same prompt side by side fill two blocks with the same content;
    neither is dropped, since block tables on the device already name both. Nearly always there is
    one, so that one is kept bare: a dict for each would make the garbage collector slow.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """A block with that content, if there is one."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Whether block `block_id` is known to hold that content."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return block_id in found
        return found is not None and found.block_id == block_id

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Makes `block` known under `key`."""
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[key] = {found.block_id: found, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Forgets block `block_id` under `key`; returns it, or None if it was not known."""
        found = self._blocks.get(key)
        if not isinstance(found, dict):
            if found is None or found.block_id != block_id:
                return None
            return self._blocks.pop(key)
        block = found.pop(block_id, None)
        if len(found) == 1:
            self._blocks[key] = next(iter(found.values()))
        return block

    def items(self) -> Iterator[tuple[BlockHashWithGroupId, KVCacheBlock]]:
        """Every (content, block) pair."""
        for key, found in self._blocks.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                yield key, block

    def __len__(self) -> int:
        return len(self._blocks)


class BlockPool:
    """Hands out blocks, counts their holders and remembers the content of full ones.

    Free blocks keep their content until they are handed out again, oldest first (LRU). Block 0 is
    the *null block*: a placeholder in block tables for pages that a request no longer needs. It is
    never handed out, freed or counted, so `num_gpu_blocks - 1` blocks are usable.

    Args:
        num_gpu_blocks: blocks, the null block among them.
        enable_caching: remember content.
        hash_block_size: tokens behind each of a request's `block_hashes`; divides every group's
            block size.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(
                f"a KV cache of {num_gpu_blocks} pages has none to hand out: page 0 is a "
                "placeholder; give it at least 2"
            )
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_gpu_blocks - 1

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds; those with content that can be found again are among them."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / self.num_usable_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hands out `num_blocks` blocks of unknown content, held once.

        Raises:
            ValueError: fewer are free.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            self._forget_content(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a holder to each of `blocks`, found by their content."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Takes one holder from each block. Those left without holders become free; the first
        given is the first to lose its content. Blocks without content go before all others."""
        with_content, without = [], []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                raise KVCacheIntegrityError(f"block {block.block_id} is freed but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (without if block.block_hash is None else with_content).append(block)
        self.free_block_queue.append_n(with_content)
        self.free_block_queue.prepend_n(without)

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """A block with that content for each group, or None if one of them has none."""
        found = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            found.append(block)
        return found

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Makes the content of `blocks[num_cached_blocks:num_full_blocks]` known.

        Args:
            blocks: every block of `request` in this group, from its first token on.
            block_size: tokens per block of the group.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = BlockHashListWithBlockSize(request.block_hashes, self.hash_block_size, block_size)
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            # Null: slid out of the window. With a hash: found by it, or cached by a twin.
            if block.is_null or block.block_hash is not None:
                continue
            self.cache_block(block, make_block_hash_with_group_id(hashes[index], kv_cache_group_id))

    def cache_block(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> None:
        """Makes the content of `block`, which has no name yet, known as `key`."""
        block.set_block_hash(key)
        self.cached_block_hash_to_block.insert(key, block)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forgets the content of these blocks; their holders keep them.

        Raises:
            ValueError: no such block.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self.num_gpu_blocks:
                raise ValueError(f"no block {block_id}: there are {self.num_gpu_blocks}")
            self._forget_content(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forgets all content. Refused (False) while requests hold blocks."""
        num_held = self.num_usable_blocks - self.get_num_free_blocks()
        if num_held:
            logger.warning("prefix cache not reset: requests still hold %d pages", num_held)
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        return True

    def check_integrity(self, num_holders: Counter[int]) -> None:
        """Checks that free + held = usable, that no block is in two places, that each reference
        count is the number of holders, and that content is found where it is.

        Args:
            num_holders: block id -> how many requests hold it.

        Raises:
            KVCacheIntegrityError: one of these does not hold.
        """
        self._check_free_queue()
        for block in self.blocks[1:]:
            held = num_holders[block.block_id]
            if block.ref_cnt != held:
                raise KVCacheIntegrityError(f"{block} is held by {held} requests")
            if (block.next_free_block is None) != (held > 0):
                raise KVCacheIntegrityError(f"{block} is held by {held} and in the free queue")
        self._check_cached_content()

    def _check_free_queue(self) -> None:
        seen: set[int] = set()
        for block in self.free_block_queue.iter_blocks_after(None):
            linked_back = block.prev_free_block and block.prev_free_block.next_free_block is block
            if block.is_null or block.ref_cnt or block.block_id in seen or not linked_back:
                raise KVCacheIntegrityError(f"{block} does not belong in the free queue")
            seen.add(block.block_id)
        if len(seen) != self.get_num_free_blocks():
            raise KVCacheIntegrityError(
                f"{len(seen)} blocks in the free queue, counted {self.get_num_free_blocks()}"
            )

    def _check_cached_content(self) -> None:
        if self.null_block.block_hash is not None:
            raise KVCacheIntegrityError("the null block has content")
        num_known = 0
        for key, block in self.cached_block_hash_to_block.items():
            num_known += 1
            if block.block_hash != key or self.blocks[block.block_id] is not block:
                raise KVCacheIntegrityError(f"{block} is found under {key!r}")
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        if num_known != num_hashed:
            raise KVCacheIntegrityError(f"{num_hashed} blocks have content, {num_known} are found")

    def _forget_content(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
            block.reset_hash()

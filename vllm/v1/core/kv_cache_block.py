# SPDX-License-Identifier: Apache-2.0
"""A page of the KV cache as the scheduler sees it, and the list of those that nobody holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)
"""Digest of a full block's tokens and of everything before them."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A `BlockHash` with the KV cache group that holds the content: one group's bytes are not
another's."""

_GROUP_ID_BYTES = 4


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The key under which group `group_id` keeps the content `block_hash`."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(_GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The content's hash in `key`."""
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group in `key`."""
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


class KVCacheBlockCopy(NamedTuple):
    """A page whose bytes are to be copied into another before the step runs."""

    src_block_id: int
    dst_block_id: int


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One page. `ref_cnt` counts the requests that hold it; at 0 it is in the free queue, where its
    content can still be found by `block_hash` until the page is handed out again."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None
    is_null: bool = False
    _block_hash: BlockHashWithGroupId | None = None

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Key of the content, once the block is full and cached."""
        return self._block_hash

    def set_block_hash(self, block_hash: BlockHashWithGroupId) -> None:
        """Names the content. A block's content does not change while it has a hash."""
        if self._block_hash is not None:
            raise ValueError(f"block {self.block_id} already has a hash")
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        """Forgets the content."""
        self._block_hash = None

    def __repr__(self) -> str:
        # The generated one would walk the whole free list.
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"block_hash={self._block_hash!r}, is_null={self.is_null})"
        )


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be handed out: a doubly linked list through the
    blocks themselves, so that a block found by its hash leaves the middle in O(1).

        head <-> oldest <-> ... <-> newest <-> tail        (head and tail are sentinels)
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(block_id=-1)
        self._tail = KVCacheBlock(block_id=-1)
        _link(self._head, self._tail)
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Takes the oldest block.

        Raises:
            ValueError: the queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes the `n` oldest blocks.

        Raises:
            ValueError: fewer than `n` are free.
        """
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        taken = []
        block = self._head.next_free_block
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        _link(self._head, block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Takes `block` out of the middle.

        Raises:
            ValueError: it is not in the queue.
        """
        if block.prev_free_block is None or block.next_free_block is None:
            raise ValueError(f"block {block.block_id} is not free")
        _link(block.prev_free_block, block.next_free_block)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Adds `block` behind all others."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds `blocks`, in their order, behind all others."""
        self._insert_after(self._tail.prev_free_block, blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Adds `blocks`, in their order, before all others."""
        self._insert_after(self._head, blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block, the next to be handed out first. For tests and checks."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The free blocks behind `cursor`; None: all."""
        block = (cursor or self._head).next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block

    def _insert_after(self, place: KVCacheBlock, blocks: list[KVCacheBlock]) -> None:
        following = place.next_free_block
        for block in blocks:
            _link(place, block)
            place = block
        _link(place, following)
        self.num_free_blocks += len(blocks)


def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
    left.next_free_block = right
    right.prev_free_block = left

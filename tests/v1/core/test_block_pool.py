# SPDX-License-Identifier: Apache-2.0
"""Blocks are handed out, shared, found again and evicted; the integrity check can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.v1.core.utils import make_request
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool, KVCacheIntegrityError
from vllm.v1.core.kv_cache_utils import KVCacheBlock

BLOCK_SIZE = 16


def make_pool(usable: int = 5) -> BlockPool:
    return BlockPool(usable + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)


def cache(pool: BlockPool, blocks: list[KVCacheBlock], prompt: list[int], group_id: int = 0):
    request = make_request("r", prompt)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, group_id)
    return request.block_hashes


def test_null_block_is_never_handed_out():
    """Block 0 stands for pages no longer needed; a request that wrote to it would write for all."""
    pool = make_pool(3)
    assert pool.null_block.block_id == 0
    assert 0 not in [b.block_id for b in pool.get_new_blocks(3)]
    with pytest.raises(ValueError):
        pool.get_new_blocks(1)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.get_num_free_blocks() == 0
    assert pool.get_usage() == 1.0


def test_pool_without_usable_blocks_is_refused():
    """A pool of only the null block would let every request wait forever."""
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1, True, BLOCK_SIZE)


def test_content_is_found_until_evicted():
    """A freed block keeps its content until it is handed out; then nobody must find it there."""
    pool = make_pool(2)
    blocks = pool.get_new_blocks(2)
    hashes = cache(pool, blocks, list(range(32)))
    pool.free_blocks(reversed(blocks))
    assert pool.get_cached_block(hashes[0], [0]) == [blocks[0]]
    # The tail was freed first, so it goes first.
    assert pool.get_new_blocks(1) == [blocks[1]]
    assert pool.get_cached_block(hashes[1], [0]) is None
    assert pool.get_cached_block(hashes[0], [0]) == [blocks[0]]
    assert pool.get_new_blocks(1) == [blocks[0]]
    assert pool.get_cached_block(hashes[0], [0]) is None
    assert len(pool.cached_block_hash_to_block) == 0


def test_touched_block_is_not_evicted():
    """A block found in the free queue is held from then on."""
    pool = make_pool(2)
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks, list(range(16)))
    pool.free_blocks(blocks)
    pool.touch(blocks)
    assert pool.get_new_blocks(1) != blocks
    with pytest.raises(ValueError):
        pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 0, "one holder is left"
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 1


def test_blocks_without_content_go_first():
    """Handing out a cached block while an empty one is free would throw content away."""
    pool = make_pool(3)
    cached, empty = pool.get_new_blocks(1), pool.get_new_blocks(1)
    cache(pool, cached, list(range(16)))
    pool.free_blocks(cached)
    pool.free_blocks(empty)
    handed_out = pool.get_new_blocks(3)
    assert handed_out[0] is empty[0]
    assert handed_out[-1] is cached[0]


def test_groups_do_not_share_content():
    """The same tokens have other bytes in another group's layers."""
    pool = make_pool()
    hashes = cache(pool, pool.get_new_blocks(1), list(range(16)), group_id=1)
    assert pool.get_cached_block(hashes[0], [0]) is None
    assert pool.get_cached_block(hashes[0], [0, 1]) is None
    assert pool.get_cached_block(hashes[0], [1]) is not None


def test_twins_are_both_known():
    """Two blocks with one content: evicting one must leave the other to be found."""
    pool = make_pool(3)
    twins = pool.get_new_blocks(3)
    for block in twins:
        hashes = cache(pool, [block], list(range(16)))
    pool.free_blocks(twins)
    for left in (2, 1):
        pool.get_new_blocks(1)
        assert pool.get_cached_block(hashes[0], [0]) is not None, f"{left} twins are left"
    pool.get_new_blocks(1)
    assert pool.get_cached_block(hashes[0], [0]) is None


def test_hash_map_pop_of_a_stranger_changes_nothing():
    """Popping (key, id) must not drop another block under that key."""
    blocks = [KVCacheBlock(i) for i in range(3)]
    known = BlockHashToBlockMap()
    known.insert(b"k", blocks[1])
    assert known.pop(b"k", 2) is None
    assert known.pop(b"other", 1) is None
    known.insert(b"k", blocks[2])
    assert known.pop(b"k", 0) is None
    assert known.contain(b"k", 1) and known.contain(b"k", 2) and not known.contain(b"k", 0)
    assert known.pop(b"k", 1) is blocks[1]
    assert known.get_one_block(b"k") is blocks[2]


def test_reset_needs_a_free_pool():
    """Content that requests still read must not be forgotten under them."""
    pool = make_pool()
    blocks = pool.get_new_blocks(2)
    hashes = cache(pool, blocks, list(range(32)))
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(hashes[0], [0]) is not None
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(hashes[0], [0]) is None
    pool.check_integrity(Counter())


def test_evicted_block_stays_held():
    """evict_blocks forgets content only: the holder goes on."""
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    hashes = cache(pool, blocks, list(range(16)))
    pool.evict_blocks({blocks[0].block_id})
    assert pool.get_cached_block(hashes[0], [0]) is None
    pool.check_integrity(Counter({blocks[0].block_id: 1}))
    with pytest.raises(ValueError, match="no block 99"):
        pool.evict_blocks({99})


def test_freeing_twice_is_an_error():
    """A block freed twice would be handed to two requests."""
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(KVCacheIntegrityError, match="nobody holds it"):
        pool.free_blocks(blocks)


def _leak(pool: BlockPool, block: KVCacheBlock) -> None:
    pool.free_block_queue.popleft()


def _double_hold(pool: BlockPool, block: KVCacheBlock) -> None:
    block.ref_cnt += 1


def _free_while_held(pool: BlockPool, block: KVCacheBlock) -> None:
    pool.free_block_queue.append(block)


def _forget_hash(pool: BlockPool, block: KVCacheBlock) -> None:
    block.reset_hash()


def _forget_map(pool: BlockPool, block: KVCacheBlock) -> None:
    pool.cached_block_hash_to_block.pop(block.block_hash, block.block_id)


def _miscount(pool: BlockPool, block: KVCacheBlock) -> None:
    pool.free_block_queue.num_free_blocks += 1


@pytest.mark.parametrize(
    "damage", [_leak, _double_hold, _free_while_held, _forget_hash, _forget_map, _miscount]
)
def test_integrity_check_finds(damage):
    """A check that cannot fail is worth nothing: each kind of damage is found."""
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks, list(range(16)))
    holders = Counter({blocks[0].block_id: 1})
    pool.check_integrity(holders)
    damage(pool, blocks[0])
    with pytest.raises(KVCacheIntegrityError):
        pool.check_integrity(holders)


def test_integrity_check_compares_holders():
    """A block table entry without a reference, and a reference without an entry."""
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    with pytest.raises(KVCacheIntegrityError, match="held by 0"):
        pool.check_integrity(Counter())
    with pytest.raises(KVCacheIntegrityError, match="held by 2"):
        pool.check_integrity(Counter({blocks[0].block_id: 2}))

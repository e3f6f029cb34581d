# SPDX-License-Identifier: Apache-2.0
"""The list of free blocks."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_leave_in_order():
    """Free blocks leave oldest first: anything else breaks LRU."""
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(5)])
    assert queue.popleft().block_id == 0
    assert ids(queue.popleft_n(2)) == [1, 2]
    assert ids(queue.get_all_free_blocks()) == [3, 4]


def test_taking_too_many_changes_nothing():
    """A refused request for blocks must not lose those it walked over."""
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(3)])
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        queue.popleft_n(4)
    assert ids(queue.popleft_n(3)) == [0, 1, 2]
    assert queue.num_free_blocks == 0
    with pytest.raises(ValueError):
        queue.popleft()


def test_removing_what_is_not_free_is_refused():
    """A block removed twice would cut the list in two."""
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[1])
    with pytest.raises(ValueError, match="block 1 is not free"):
        queue.remove(blocks[1])
    assert ids(queue.get_all_free_blocks()) == [0, 2]


class QueueAgainstList(RuleBasedStateMachine):
    """The linked list does what a plain list does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(12)]
        self.queue = FreeKVCacheBlockQueue(self.blocks)
        self.model = list(range(12))

    @rule(n=st.integers(0, 4))
    def pop(self, n: int) -> None:
        n = min(n, len(self.model))
        assert ids(self.queue.popleft_n(n)) == self.model[:n]
        del self.model[:n]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.model))
        self.queue.remove(self.blocks[block_id])
        self.model.remove(block_id)

    @rule(data=st.data(), at_front=st.booleans())
    def put_back(self, data: st.DataObject, at_front: bool) -> None:
        taken = [i for i in range(12) if i not in self.model]
        back = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
        put = self.queue.prepend_n if at_front else self.queue.append_n
        put([self.blocks[i] for i in back])
        self.model = back + self.model if at_front else self.model + back

    @invariant()
    def same(self) -> None:
        assert ids(self.queue.get_all_free_blocks()) == self.model
        assert self.queue.num_free_blocks == len(self.model)


TestQueueAgainstList = QueueAgainstList.TestCase

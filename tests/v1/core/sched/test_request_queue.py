# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests get their turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.utils import make_request
from vllm.v1.core.sched.request_queue import (
    ASKED_AT_ONCE,
    DeferredRequests,
    FCFSRequestQueue,
    PriorityRequestQueue,
    SchedulingPolicy,
    create_request_queue,
)


def test_fcfs_is_by_arrival_not_by_clock():
    """A client's clock, or a tie, must not decide who goes first."""
    queue = FCFSRequestQueue()
    requests = [make_request(str(i), 1, arrival_time=9.0 - i // 2) for i in range(6)]
    for request in requests:
        queue.add_request(request)
    assert list(queue) == requests
    assert queue.peek_request() is requests[0]
    assert [queue.pop_request() for _ in requests] == requests
    with pytest.raises(IndexError):
        queue.pop_request()


def test_preempted_request_takes_its_old_place():
    """A request that was admitted past an older one does not get before it by being preempted."""
    queue = FCFSRequestQueue()
    old, young, youngest = (make_request(str(i), 1) for i in range(3))
    for request in (old, youngest):
        queue.add_request(request)
    queue.prepend_request(young)
    assert list(queue) == [old, young, youngest]


def test_priority_then_arrival():
    """Lower priority values first; equal ones by arrival."""
    queue = PriorityRequestQueue()
    late, early, urgent = (
        make_request("late", 1, priority=1, arrival_time=2.0),
        make_request("early", 1, priority=1, arrival_time=1.0),
        make_request("urgent", 1, priority=-1, arrival_time=3.0),
    )
    for request in (late, early, urgent):
        queue.add_request(request)
    assert list(queue) == [urgent, early, late]


@pytest.mark.parametrize("policy", SchedulingPolicy)
@given(data=st.data())
def test_removal_from_anywhere(policy: SchedulingPolicy, data: st.DataObject):
    """Aborts take out any request and leave the others in order; a stranger is refused."""
    queue = create_request_queue(policy)
    requests = [
        make_request(str(i), 1, priority=data.draw(st.integers(0, 2)), arrival_time=0.0)
        for i in range(data.draw(st.integers(1, 8)))
    ]
    for request in requests:
        queue.add_request(request)
    order = list(queue)
    gone = data.draw(st.lists(st.sampled_from(requests), unique=True))
    queue.remove_requests(gone)
    assert list(queue) == [request for request in order if request not in gone]
    assert len(queue) == len(requests) - len(gone)
    with pytest.raises(ValueError, match="is not in the queue"):
        queue.remove_request(make_request("stranger", 1))


@settings(max_examples=30)
@given(num=st.integers(0, 5 * ASKED_AT_ONCE), data=st.data())
def test_deferred_requests_are_asked_in_turn(num: int, data: st.DataObject):
    """Each step asks few; the first in the order always, and every one within as many steps as it
    takes to ask all of them once. Those that leave meanwhile keep nobody from a turn."""
    queue = DeferredRequests(SchedulingPolicy.FCFS)
    requests = [make_request(str(i), 1) for i in range(num)]
    for request in reversed(requests):
        queue.add_request(request)
    asked: set[str] = set()
    for _ in range(2 * (-(-num // ASKED_AT_ONCE))):
        before = list(queue)
        turn = queue.take_turn()
        assert len(turn) == len(set(turn)) <= 2 * ASKED_AT_ONCE
        assert turn[:ASKED_AT_ONCE] == before[:ASKED_AT_ONCE]
        assert len(queue) == len(before) - len(turn) and not any(r in queue for r in turn)
        asked |= {request.request_id for request in turn}
        for request in turn:
            if data.draw(st.booleans()):
                queue.add_request(request)
    assert len(asked) == num

# SPDX-License-Identifier: Apache-2.0
"""Waiting requests, in the order in which they get their turn."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from vllm.v1.request import Request


class SchedulingPolicy(Enum):
    """FCFS: in order of arrival. PRIORITY: lower values of `Request.priority` first, then by
    arrival."""

    FCFS = "fcfs"
    PRIORITY = "priority"


OrderKey = Callable[[Request], tuple[Any, ...]]


def fcfs_order(request: Request) -> tuple[Any, ...]:
    """Sorts by arrival at this engine."""
    return (request.sequence,)


def priority_order(request: Request) -> tuple[Any, ...]:
    """Sorts by priority, then by the time of arrival that the front noted."""
    return (request.priority, request.arrival_time, request.sequence)


def get_order_key(policy: SchedulingPolicy) -> OrderKey:
    """The policy as a sort key: unique for each request and never changing."""
    return fcfs_order if policy is SchedulingPolicy.FCFS else priority_order


class RequestQueue(ABC):
    """Requests in a fixed order. Iterating begins with the one whose turn it is and does not
    remove any."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Puts `request` in its place."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Takes the first request.

        Raises:
            IndexError: the queue is empty.
        """

    @abstractmethod
    def peek_request(self) -> Request:
        """The first request, left where it is.

        Raises:
            IndexError: the queue is empty.
        """

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Puts a request that was taken back: before all that come after it in the order."""

    @abstractmethod
    def prepend_requests(self, requests: RequestQueue) -> None:
        """Puts several back."""

    @abstractmethod
    def remove_request(self, request: Request) -> None:
        """Takes `request` out.

        Raises:
            ValueError: it is not there.
        """

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Takes several out."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class _SortedRequestQueue(RequestQueue):
    """A sorted list: finding a place takes O(log n), and moving 10,000 pointers a few microseconds;
    looking at the first few costs nothing however long the queue is."""

    def __init__(self, order_key: OrderKey) -> None:
        self._key = order_key
        self._requests: list[Request] = []

    def add_request(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=self._key)

    def pop_request(self) -> Request:
        return self._requests.pop(0)

    def peek_request(self) -> Request:
        return self._requests[0]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: RequestQueue) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        if request not in self:
            raise ValueError(f"request {request.request_id} is not in the queue")
        del self._requests[self._place(request)]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self.remove_request(request)

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, self._key(request), key=self._key)

    def __contains__(self, request: Request) -> bool:
        return self._requests[(place := self._place(request)) : place + 1] == [request]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class FCFSRequestQueue(_SortedRequestQueue):
    """First come, first served. A preempted request takes its old place, not the very first."""

    def __init__(self) -> None:
        super().__init__(fcfs_order)


class PriorityRequestQueue(_SortedRequestQueue):
    """Lower values of `Request.priority` first, then by arrival."""

    def __init__(self) -> None:
        super().__init__(priority_order)


ASKED_AT_ONCE = 16
"""Deferred requests that each step asks again: this many of the first, and as many in turn."""


class DeferredRequests(_SortedRequestQueue):
    """Waiting requests that wait for something else than room, so that others do not wait for them.
    A step asks a few whether they still do, so that any number of them costs it the same:

        A B C D E F G H I J K L ...      asked at once: 3
        step 1: A B C and D E F   step 2: A B C and G H I   step 3: A B C and J K L   ...
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__(get_order_key(policy))
        self._last_asked: tuple[Any, ...] | None = None

    def take_turn(self) -> list[Request]:
        """Takes out those that are asked in this step."""
        begin = ASKED_AT_ONCE
        if self._last_asked is not None:
            after_last = bisect.bisect_right(self._requests, self._last_asked, key=self._key)
            begin = max(begin, after_last)
        if begin >= len(self._requests):
            begin = ASKED_AT_ONCE
        end = begin + ASKED_AT_ONCE
        turn = self._requests[:ASKED_AT_ONCE] + self._requests[begin:end]
        self._last_asked = self._key(turn[-1]) if turn else None
        del self._requests[begin:end], self._requests[:ASKED_AT_ONCE]
        return turn


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue for that policy."""
    if policy is SchedulingPolicy.FCFS:
        return FCFSRequestQueue()
    return PriorityRequestQueue()

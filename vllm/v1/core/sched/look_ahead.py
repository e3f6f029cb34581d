# SPDX-License-Identifier: Apache-2.0
"""Who may go ahead of a request that does not fit at the moment, and for how long."""

from __future__ import annotations

import enum

from vllm.v1.request import Request

MAX_PASSED_OVER = 8
"""Requests that one step passes over: what a step spends on those that do not fit is bounded."""

MAX_OVERTAKEN = 64
"""Requests that may go ahead of one that waits. After that, the pages that become free are kept
for it, so that it gets its turn however many small requests arrive."""

MAX_NOT_YET = 64
"""Requests that one step finds waiting for something else than room; the next goes on behind them,
as they are deferred."""


class Admission(enum.Enum):
    """What became of a waiting request whose turn it was. NO_ROOM: others may go ahead of it, for a
    while. NOT_YET: it waits for something else than room, so others do not wait for it."""

    ADMITTED = enum.auto()
    NO_ROOM = enum.auto()
    NOT_YET = enum.auto()


class LookAhead:
    """One step's walk along the queue.

        queue     H (100 pages)   a (5 pages)   b (10 pages)   ...      20 pages are free
        step      passed over     admitted      admitted                H.num_overtaken = 2
    """

    def __init__(self) -> None:
        self._passed_over: list[Request] = []
        self.deferred: list[Request] = []
        self.is_closed = False

    def admitted(self) -> None:
        """The request at hand runs; it has overtaken all that were passed over."""
        for request in self._passed_over:
            request.num_overtaken += 1
            self.is_closed |= request.num_overtaken >= MAX_OVERTAKEN

    def passed_over(self, request: Request) -> None:
        """`request` does not fit now. Nobody behind it is looked at if it has been overtaken often
        enough, or if enough were passed over."""
        self._passed_over.append(request)
        self.is_closed |= request.num_overtaken >= MAX_OVERTAKEN
        self.is_closed |= len(self._passed_over) >= MAX_PASSED_OVER

    def not_yet(self, request: Request) -> None:
        """`request` waits for something else than room."""
        self.deferred.append(request)
        self.is_closed |= len(self.deferred) >= MAX_NOT_YET

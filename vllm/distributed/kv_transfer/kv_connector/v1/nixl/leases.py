# SPDX-License-Identifier: Apache-2.0
"""Pages that are kept for peers after their request has ended.

    hold --renew, renew ...--> release (the peer has read, or will not)   -> may be freed
                      +------> its time runs out                          -> may be freed

A peer reads first and then asks whether the lease still held: only if so does it use what it read.
So what was freed meanwhile is never taken for the request's, whatever clocks say.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

# Leases that ended, remembered so that a late peer gets its answer at once.
_MAX_ENDED = 65536


class Leases:
    """Leases by request id. Used by the worker's thread and by the side channel's."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}
        self._released: set[str] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._deadlines)

    def hold(self, request_id: str, deadline: float) -> None:
        """Pages of `request_id` are kept until `deadline` or longer."""
        with self._lock:
            self._deadlines[request_id] = max(deadline, self._clock() + self.seconds)

    def renew(self, request_ids: Iterable[str]) -> None:
        """The peer still waits. Unknown ids are passed over."""
        with self._lock:
            deadline = self._clock() + self.seconds
            for request_id in request_ids:
                if request_id in self._deadlines:
                    self._deadlines[request_id] = deadline

    def release(self, request_id: str) -> bool | None:
        """The peer needs the pages no more. Whether they were kept until now; None: the lease is
        not known, and may be about to be."""
        with self._lock:
            if self._deadlines.pop(request_id, None) is not None:
                self._released.add(request_id)
                self._end(request_id)
                return True
            return False if request_id in self._ended else None

    def take_released(self) -> set[str]:
        """Requests that peers have released since this was last called."""
        with self._lock:
            released, self._released = self._released, set()
            return released

    def take_expired(self) -> set[str]:
        """Requests whose time has run out since this was last called."""
        with self._lock:
            now = self._clock()
            expired = {request for request, at in self._deadlines.items() if at <= now}
            for request_id in expired:
                del self._deadlines[request_id]
                self._end(request_id)
            return expired

    def _end(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

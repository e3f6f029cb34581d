# SPDX-License-Identifier: Apache-2.0
"""Memory of a KV cache on the host, asked of the system before it is used.

The system gives memory when it is first written, 2 MB at a time at best, and clears it meanwhile. Pages
of a cache are handed out in order and have a part in every layer, so that a step waits for many of
these at once: 60 ms and more, on virtual machines.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
_SLICE_BYTES = 2 << 20  # in one call: a request that comes meanwhile waits as long
_AHEAD_BYTES = 256 << 20


class CacheMemory:
    """What there is to be asked for.

    Args:
        caches: tensors of the cache, page after page in memory; several may share theirs.
        num_pages: pages of each.
        ahead_bytes: how much is to be ready beyond the pages in use, all caches together.
    """

    def __init__(
        self, caches: Iterable[torch.Tensor], num_pages: int, ahead_bytes: int = _AHEAD_BYTES
    ) -> None:
        storages = {s.data_ptr(): s for s in (cache.untyped_storage() for cache in caches)}
        self._storages = list(storages.values()) if sys.platform == "linux" else []
        self._num_pages = num_pages
        page_bytes = sum(s.nbytes() for s in self._storages) // num_pages
        self._ahead_pages = -(-ahead_bytes // max(page_bytes, 1))
        self._ready_pages = self._next_storage = 0

    def prepare(self, num_used: int) -> bool:
        """Asks for a little of what pages beyond the first `num_used` need. False: all is there."""
        wanted = min(num_used + self._ahead_pages, self._num_pages)
        if not self._storages or self._ready_pages >= wanted:
            return False
        largest = max(s.nbytes() for s in self._storages) // self._num_pages
        stop = min(self._ready_pages + max(_SLICE_BYTES // max(largest, 1), 1), self._num_pages)
        if not _ask_for(self._storages[self._next_storage], self._ready_pages, stop, self._num_pages):
            self._storages = []  # a system without this: memory comes when it is written
            return False
        self._next_storage += 1
        if self._next_storage == len(self._storages):
            self._ready_pages, self._next_storage = stop, 0
        return True


def _ask_for(storage: torch.UntypedStorage, first: int, stop: int, num_pages: int) -> bool:
    """Pages [first, stop) of a storage of `num_pages`; what is written stays. False: refused."""
    page_bytes = storage.nbytes() // num_pages
    begin = (storage.data_ptr() + first * page_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = storage.data_ptr() + stop * page_bytes - begin
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("KV cache memory is not asked for early: errno %d", ctypes.get_errno())
    return False

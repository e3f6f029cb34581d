# SPDX-License-Identifier: Apache-2.0
"""Memory for weights that are read from end to end each step: huge pages, where the system has them.

A step reads more small pages than a core remembers the addresses of, and prefetching ends with each;
huge pages (2 MB) take small weights together.
"""

from __future__ import annotations

import math
import mmap

import torch

_HUGE_PAGE = 2 << 20
_REGION_BYTES = 64 << 20
_ALIGNMENT = 64
# Linux's number of the advice; None where there is no such advice.
_ADVICE: int | None = vars(mmap).get("MADV_HUGEPAGE")


class _Region:
    """Bytes that are handed out one after the other; they live as long as a tensor in them."""

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(_ADVICE)
        except OSError:  # a kernel without huge pages: small ones do as well
            pass
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        self._bytes = raw[-raw.data_ptr() % _HUGE_PAGE :][:nbytes]
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """uint8 (nbytes,), or None where there are not so many left."""
        if self._used + nbytes > self._bytes.numel():
            return None
        first = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[first : first + nbytes]


_region: _Region | None = None


def empty_weight(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Like torch.empty on the CPU, for tensors that stay. One thread at a time may call it."""
    global _region
    nbytes = math.prod(shape) * dtype.itemsize
    if _ADVICE is None or not nbytes:
        return torch.empty(*shape, dtype=dtype)
    if nbytes >= _REGION_BYTES:  # alone: it is freed with its tensor, and the open region goes on
        return _Region(nbytes).take(nbytes).view(dtype).view(shape)
    taken = None if _region is None else _region.take(nbytes)
    if taken is None:
        _region = _Region(_REGION_BYTES)
        taken = _region.take(nbytes)
    return taken.view(dtype).view(shape)

# SPDX-License-Identifier: Apache-2.0
"""Memory of a KV cache that is there before it is used: as much as was asked for, and no more."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker import cpu_cache_memory
from vllm.v1.worker.cpu_cache_memory import CacheMemory
from vllm.v1.worker.gpu.block_table import BlockTables

_NUM_PAGES, _PAGE_BYTES = 64, 1 << 20


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor the system has given memory for."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * count)()
    size = ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), size, flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.fixture
def caches() -> list[torch.Tensor]:
    device = torch.device("cpu")
    return [current_platform.zeroed_bytes(_NUM_PAGES * _PAGE_BYTES, device) for _ in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for memory")
def test_memory_is_ready_ahead_of_use(caches):
    """Faults: steps wait for memory; an unused cache takes all of its own; what was written is
    cleared."""
    caches[0][: 3 * _PAGE_BYTES] = 7
    # Views of one cache are one cache.
    memory = CacheMemory([*caches, caches[1][5:]], _NUM_PAGES, ahead_bytes=16 * _PAGE_BYTES)
    if not memory.prepare(0):
        pytest.skip("a system that gives memory only when it is written")
    calls = 1
    while memory.prepare(0):
        calls += 1
    # A slice is 2 MB of one cache, and huge pages may round what is given up.
    assert calls == 2 * 8 // 2
    for cache in caches:
        assert 8 <= resident_bytes(cache) / _PAGE_BYTES <= 8 + 4
    while memory.prepare(20):
        pass
    for cache in caches:
        assert 28 <= resident_bytes(cache) / _PAGE_BYTES <= 28 + 4
    while memory.prepare(_NUM_PAGES):
        pass
    assert all(resident_bytes(cache) >= cache.nbytes - 2 * mmap.PAGESIZE for cache in caches)
    assert not memory.prepare(_NUM_PAGES)
    assert (caches[0][: 3 * _PAGE_BYTES] == 7).all() and not caches[0][3 * _PAGE_BYTES :].any()


def test_a_system_that_refuses_is_not_asked_again(caches, monkeypatch):
    """Fault: an idle engine asks for ever, on a core of its own."""
    monkeypatch.setattr(cpu_cache_memory, "_MADV_POPULATE_WRITE", 9999)
    memory = CacheMemory(caches, _NUM_PAGES)
    assert not memory.prepare(0) and not memory.prepare(_NUM_PAGES)


def test_pages_seen_are_the_managers():
    """Fault: pages in use are counted in kernel blocks, and memory is asked for far beyond them."""
    tables = BlockTables([32, 16], 4, [8, 8], [16, 16])
    assert tables.num_pages_seen() == 1
    tables.append_block_ids(2, ([5], [9]), overwrite=True)
    tables.append_block_ids(1, ([11, 3], [10]), overwrite=True)
    assert tables.num_pages_seen() == 12

# SPDX-License-Identifier: Apache-2.0
"""One thread pool for torch and for our kernels.

Two OpenMP runtimes (numba brings another than torch's) or numba's own pool beside torch's spin
against each other on the same cores. So kernels are not started by numba: they are plain C
functions handed to `GOMP_parallel` of the very runtime that torch has loaded (GNU, LLVM and Intel
runtimes all export it), and run on torch's own threads. Each thread takes work items off an
atomic counter, so one that comes late finds nothing left to do.

A thread that waits for the others spins first. Measured (2 cores shared with other busy
processes, a decode step of a 135M model): with the runtime's default spin count, steps took
several times as long, since the spinning thread keeps the one that is waited for off its core;
with few spins or none it sleeps and lets it run. `vllm.env_override` sets the count before torch
is loaded.

Only one thread at a time may launch kernels: scratch memory and argument records are shared.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache, partial

import torch

from vllm.logger import init_logger

from .kernel_library import Kernel

logger = init_logger(__name__)
_num_threads = 0


def init_threads(num_threads: int) -> None:
    """Sets how many threads torch and our kernels use; call once when a worker starts. At least
    1.
    """
    global _num_threads
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    _num_threads = num_threads if _gomp_parallel() is not None else 1


def num_threads() -> int:
    """Threads a kernel may use; torch's number where `init_threads` was not called."""
    if not _num_threads:
        init_threads(torch.get_num_threads())
    return _num_threads


@cache
def _gomp_parallel():
    """`GOMP_parallel(function, data, num_threads, flags)` of torch's OpenMP runtime, None where
    torch has none.
    """
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        function = ctypes.CDLL(library).GOMP_parallel
    except (OSError, AttributeError) as error:
        logger.warning(
            "torch's OpenMP runtime was not found (%s): CPU kernels use one thread", error
        )
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


class Arguments:
    """A kernel's arguments: a fixed record of int64 ("q") and float64 ("d") words in memory.

    `write(*values)` fills it, without a Python frame: a decode step does this some three hundred
    times.
    """

    __slots__ = ("_buffer", "address", "write")

    def __init__(self, layout: str) -> None:
        record = struct.Struct("=" + layout)
        self._buffer = ctypes.create_string_buffer(record.size)
        self.address = ctypes.addressof(self._buffer)
        self.write = partial(record.pack_into, self._buffer, 0)

    def read(self, first: int, count: int) -> tuple[int, ...]:
        """`count` int64 words from byte offset `first`."""
        return struct.unpack_from(f"={count}q", self._buffer, first)


def launch(kernel: Kernel, args_address: int, threads: int, long: bool = False) -> None:
    """Runs the kernel on `threads` threads of torch's pool; returns when all are done.

    Work for one thread is called directly and keeps the GIL, which is the quicker, unless it is
    `long`: then other Python threads may run meanwhile.
    """
    if threads == 1 and (not long or _gomp_parallel() is None):
        kernel.run(args_address)
    else:
        _gomp_parallel()(kernel.address, args_address, threads, 0)


class Scratch:
    """Memory that kernels write to between passes: grows, never shrinks, aligned to 64 bytes."""

    def __init__(self) -> None:
        self._storage = torch.empty(0, dtype=torch.uint8)
        self.address = 0
        self.nbytes = 0

    def reserve(self, nbytes: int) -> int:
        if nbytes > self.nbytes:
            self._storage = torch.empty(nbytes + 64, dtype=torch.uint8)
            self.address = (self._storage.data_ptr() + 63) // 64 * 64
            self.nbytes = nbytes
        return self.address

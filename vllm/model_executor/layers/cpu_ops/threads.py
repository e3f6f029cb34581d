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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch

from vllm.logger import init_logger

from .kernel_library import Kernel
from .op_args import ROWS

logger = init_logger(__name__)
_num_threads = 0
_recorder: Recorder | None = None


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


@dataclass(frozen=True, slots=True)
class Counts:
    """Byte offsets of the words of a kernel's record that follow the size of the batch. A program is
    recorded for the largest one and sets them for each.

    Args:
        rows: word that counts rows; None: none does.
        panels: word with the panels of a packed weight, of each of which and up to MAX_ROWS rows
            work is made, counted in ROWS.
        requests: word that counts requests.
    """

    rows: int | None = ROWS
    panels: int | None = None
    requests: int | None = None


class Recorder:
    """Notes launches, for a program that runs them later: `entries` of (kernel, arguments, serial,
    counters), and what else must live as long."""

    def __init__(self) -> None:
        self.entries: list[tuple[Kernel, Arguments, bool, int]] = []
        self.kept: list[object] = []

    def note(
        self, kernel: Kernel, args: Arguments, serial: bool = False, counters: int = 1
    ) -> None:
        """A launch with arguments that nobody else writes.

        Args:
            serial: one thread runs it, once; else any may, and takes work by the counters.
            counters: words at the head of the arguments that must be 0 when it begins.
        """
        self.entries.append((kernel, args, serial, counters))


@contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Launches are noted inside, and nothing runs.

    Raises:
        RuntimeError: one is being recorded already.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("a program is recorded inside another's recording")
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None


def recording() -> Recorder | None:
    """The recorder that notes launches at the moment."""
    return _recorder


_ROWS_ALONE = Counts()


class Arguments:
    """A kernel's arguments: a fixed record of int64 ("q") and float64 ("d") words in memory.

    `write(*values)` fills it, without a Python frame: a decode step does this some three hundred
    times.
    """

    __slots__ = ("_buffer", "_layout", "address", "counts", "write")
    _shared: dict[int, Arguments] = {}

    def __init__(self, layout: str, counts: Counts = _ROWS_ALONE, shared: bool = True) -> None:
        """`shared`: a launcher's own, which it writes anew for each launch; `at` finds it."""
        record = struct.Struct("=" + layout)
        self.counts = counts
        self._layout = layout
        self._buffer = ctypes.create_string_buffer(record.size)
        self.address = ctypes.addressof(self._buffer)
        self.write = partial(record.pack_into, self._buffer, 0)
        if shared:
            self._shared[self.address] = self

    @classmethod
    def at(cls, address: int) -> Arguments:
        """The shared record at an address."""
        return cls._shared[address]

    def copy(self) -> Arguments:
        """A record of its own with the same words."""
        copy = Arguments(self._layout, self.counts, shared=False)
        ctypes.memmove(copy.address, self.address, len(self._buffer))
        return copy

    def words(self) -> tuple[int, ...]:
        """All of it as int64."""
        return self.read(0, len(self._buffer) // 8)

    def read(self, first: int, count: int) -> tuple[int, ...]:
        """`count` int64 words from byte offset `first`."""
        return struct.unpack_from(f"={count}q", self._buffer, first)


def launch(kernel: Kernel, args_address: int, threads: int, long: bool = False) -> None:
    """Runs the kernel on `threads` threads of torch's pool; returns when all are done.

    Work for one thread is called directly and keeps the GIL, which is the quicker, unless it is
    `long`: then other Python threads may run meanwhile. While a program is recorded it is noted
    instead, with its arguments.
    """
    if _recorder is not None:
        _recorder.note(kernel, Arguments.at(args_address).copy())
    elif threads == 1 and (not long or _gomp_parallel() is None):
        kernel.run(args_address)
    else:
        _gomp_parallel()(kernel.address, args_address, threads, 0)


class Scratch:
    """Memory that kernels write to between passes: grows, never shrinks, aligned to 64 bytes. It at
    least doubles, since programs keep what they were recorded with."""

    def __init__(self) -> None:
        self.storage = torch.empty(0, dtype=torch.uint8)
        self.address = 0
        self.nbytes = 0

    def reserve(self, nbytes: int) -> int:
        if nbytes > self.nbytes:
            nbytes = max(nbytes, 2 * self.nbytes)
            self.storage = torch.empty(nbytes + 64, dtype=torch.uint8)
            self.address = (self.storage.data_ptr() + 63) // 64 * 64
            self.nbytes = nbytes
        return self.address

# SPDX-License-Identifier: Apache-2.0
"""A step as one program: what it launches is noted once, and run again without Python.

    run() -> rms_norm | packed_gemm | rotary | plan | attend | ...      noted: (kernel, arguments)
    replay:  every thread walks that list; the last to leave an entry opens the next

Noting runs no kernel: what `run` returns is written by the first replay. Its tensors come from an
arena, in which memory is used again as soon as its tensor is gone, as `run` would do it; so they
must not be read by the host, and only kernels may compute. A program is noted for the largest
batch. For a smaller one the words that count rows and requests are set anew, nothing else: rows lie
where they lay. See program_kernels.py for how threads
take turns.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.platforms.static_graph import SizedGraph

from . import program_args as A
from .elementwise import copy_rows, scale
from .kernel_library import KernelLibrary
from .op_args import ROWS, STEP
from .panel_sizes import MAX_ROWS, SHARES
from .threads import Arguments, Counts, Recorder, num_threads, record

LIBRARY = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
_ALIGNMENT = 64
# Some 20 microseconds: as long as a waiting thread's peer takes for its last piece of work.
_SPINS = 1000
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
}
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}


# What torch computes in models besides layers, by kernels: (arguments, memory for the result).
_COMPUTED: dict[object, Callable[..., torch.Tensor]] = {
    _aten.clone.default: lambda x, out: copy_rows(x, out),
    _aten.mul.Tensor: lambda x, factor, out: scale(x, factor, out),
}


class _Arena:
    """Memory for tensors of programs, in powers of two; what a tensor leaves another one gets. All
    programs share it, since no two run at once, and it is never given back."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * shape.numel()
        size = max(_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        block = free.pop() if free else _aligned(size)
        lent = block[:]
        # The tensor holds `lent`: when its storage is gone, so is that.
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent)[:nbytes].view(dtype).view(shape)


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + nbytes]


_arena = _Arena()
# Words of programs and of helpers, for the life of the process.
_read_by_helpers: list[np.ndarray] = []


class _Allocations(TorchDispatchMode):
    """Sends a recording's tensors to the arena, lets views pass, and refuses what torch computes, but
    what kernels can compute on the rows of `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        if func in _COMPUTED and not any(isinstance(arg, torch.Tensor) for arg in args[1:]):
            return _computed(func, self._num_tokens, *args)
        if func not in _ALLOCATIONS:
            with self:  # flatten, chunk and the like are made of others
                out = func.decompose(*args, **kwargs)
            if out is NotImplemented:
                raise RuntimeError(f"torch computes {func} in it")
            return out
        like = args[0] if isinstance(args[0], torch.Tensor) else None
        shape = like.shape if func is _aten.empty_like.default else args[-1]
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        return _arena.empty(torch.Size(shape), dtype)


def _computed(func, num_tokens: int, x: torch.Tensor, *args: float) -> torch.Tensor:
    if x.dim() == 0 or x.shape[0] != num_tokens:
        raise RuntimeError(f"torch computes {func} in it, on {tuple(x.shape)}, not on tokens' rows")
    try:
        return _COMPUTED[func](x, *args, _arena.empty(x.shape, x.dtype))
    except ValueError as error:
        raise RuntimeError(f"torch computes {func} in it: {error}") from error


class _Records:
    """The arguments of all entries, a row of words each, and which of them follow the batch."""

    def __init__(self, args: list[Arguments], num_tokens: int, num_reqs: int) -> None:
        own = {record.address: record for record in args}
        width = max(len(record.words()) for record in own.values())
        row_bytes = -(-8 * width // _ALIGNMENT) * _ALIGNMENT
        self._words = _aligned(len(own) * row_bytes).view(np.int64).reshape(len(own), -1)
        self.addresses: dict[int, int] = {}
        for words, record in zip(self._words, own.values()):
            words[: len(record.words())] = record.words()
            self.addresses[record.address] = words.ctypes.data
        counts = [record.counts for record in own.values()]

        def where(wanted: Callable[[Counts], bool]) -> np.ndarray:
            return np.array([i for i, count in enumerate(counts) if wanted(count)], np.intp)

        self._by_row = where(lambda c: c.rows == ROWS)
        self._multiplied = where(lambda c: c.rows not in (None, ROWS))
        self._rows_at = np.array([counts[i].rows // 8 for i in self._multiplied], np.intp)
        self._by_panel = where(lambda c: c.panels is not None)
        panels_at = np.array([counts[i].panels // 8 for i in self._by_panel], np.intp)
        self._panels = self._words[self._by_panel, panels_at]
        self._by_request = where(lambda c: c.requests is not None)
        self._requests_at = np.array([counts[i].requests // 8 for i in self._by_request], np.intp)
        self._set_up_rows(num_tokens)
        self.size = (0, 0)
        self.resize(num_tokens, num_reqs)

    def _set_up_rows(self, num_tokens: int) -> None:
        rows = self._words[self._by_row, ROWS // 8]
        multiplied = self._words[self._multiplied, self._rows_at]
        if np.any(rows % num_tokens) or np.any(multiplied % num_tokens):
            raise RuntimeError(f"kernels work on rows that are not the {num_tokens} tokens'")
        self._rows, self._multiplied_rows = rows // num_tokens, multiplied // num_tokens
        self._panel_rows = self._multiplied_rows[np.isin(self._multiplied, self._by_panel)]

    def resize(self, num_tokens: int, num_reqs: int) -> None:
        """Everything is for so many tokens and requests."""
        if self.size == (num_tokens, num_reqs):
            return
        self.size, threads = (num_tokens, num_reqs), num_threads()
        words, rows = self._words, self._rows * num_tokens
        words[self._by_row, ROWS // 8] = rows
        words[self._by_row, STEP // 8] = np.maximum(1, rows // (4 * threads))
        words[self._multiplied, self._rows_at] = self._multiplied_rows * num_tokens
        items = self._panels * -(-self._panel_rows * num_tokens // MAX_ROWS)
        words[self._by_panel, ROWS // 8] = items
        words[self._by_panel, STEP // 8] = SHARES * threads
        words[self._by_request, self._requests_at] = num_reqs


class KernelProgram(SizedGraph):
    """What `run` launches, in order, on all threads of `init_threads`.

    Raises:
        RuntimeError: something else than kernels computes in `run`.
    """

    def __init__(
        self, run: Callable[[], torch.Tensor], num_tokens: int = 1, num_reqs: int = 1
    ) -> None:
        recorder = Recorder()
        with record(recorder), _Allocations(num_tokens):
            output = run()
        if not recorder.entries:
            raise RuntimeError("nothing was launched")
        self._output = self._rows = output
        self._kept = recorder.kept
        self._names = [kernel.name for kernel, *_ in recorder.entries]
        self._records = _Records([args for _, args, *_ in recorder.entries], num_tokens, num_reqs)
        self._record, self._entries = _program_record(recorder, self._records.addresses)
        self._helpers = _Helpers.of(num_threads())
        address = self._helpers.address if self._helpers else 0
        self._args = (ctypes.c_int64 * 3)(self._record.ctypes.data, address, 0)
        self._args_address = ctypes.addressof(self._args)
        self._run = _entry_point("run_program")

    def replay(self, num_tokens: int | None = None, num_reqs: int | None = None) -> torch.Tensor:
        if num_tokens is not None:
            self._records.resize(num_tokens, num_reqs)
        self._run(self._args_address)
        if num_tokens != len(self._rows):
            self._rows = self._output[:num_tokens]
        return self._rows

    @property
    def output(self) -> torch.Tensor:
        return self._output

    def cycles(self) -> list[tuple[str, int]]:
        """(kernel, ticks of the time stamp counter) of each entry in the last replay."""
        ended = self._entries[:, A.ENDED // 8].tolist()
        began = [self._args[2], *ended]
        return [(name, end - start) for name, start, end in zip(self._names, began, ended)]


def _program_record(
    recorder: Recorder, addresses: dict[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(the program's words, its entries) as program_args.py lays them out; `addresses`: where each
    noted record is."""
    count = len(recorder.entries)
    raw = _aligned(A.PROGRAM_BYTES).view(np.int64)
    entries = _aligned(count * A.ENTRY_BYTES).view(np.int64).reshape(count, -1)
    for entry, (kernel, args, serial, counters) in zip(entries, recorder.entries):
        entry[A.KERNEL // 8], entry[A.ARGS // 8] = kernel.address, addresses[args.address]
        entry[A.SERIAL // 8], entry[A.COUNTERS // 8] = serial, counters
    raw[A.ENTRIES // 8], raw[A.NUM_ENTRIES // 8] = entries.ctypes.data, count
    raw[A.STATE // 8] = count << A.ACTIVE_BITS
    _set_waiting(raw)
    _keep_for_helpers(raw, entries)
    return raw, entries


def _keep_for_helpers(*words: np.ndarray) -> None:
    """A helper that comes late still looks at these, after the program itself is gone."""
    _read_by_helpers.extend(words)


def _set_waiting(raw: np.ndarray) -> None:
    wait, wake, syscall, sched_yield = _system_calls()
    raw[A.SPINS // 8] = _SPINS
    raw[A.FUTEX_WAIT // 8], raw[A.FUTEX_WAKE // 8] = wait, wake
    raw[A.SYSCALL // 8], raw[A.YIELD // 8] = syscall, sched_yield


@cache
def _system_calls() -> tuple[int, int, int, int]:
    """Futex operations with the number of the call above them, `syscall` and `sched_yield`; zeros
    for the first three where there is no futex that we know."""
    libc = ctypes.CDLL(None)

    def address(name: str) -> int:
        return ctypes.cast(libc[name], ctypes.c_void_p).value

    number = _FUTEX_SYSCALL.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return 0, 0, 0, address("sched_yield")
    high = number << 32
    return (
        high | _FUTEX_WAIT_PRIVATE,
        high | _FUTEX_WAKE_PRIVATE,
        address("syscall"),
        address("sched_yield"),
    )


@cache
def _entry_point(name: str) -> Callable[[int], None]:
    """A kernel that is called without the GIL."""
    address = LIBRARY.load("float32")[name].address
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Helpers:
    """Threads that help with programs, asleep in between. They end with the process."""

    def __init__(self, count: int) -> None:
        self._record = _aligned(A.HELPERS_BYTES).view(np.int64)
        self.address = self._record.ctypes.data
        _set_waiting(self._record)
        _keep_for_helpers(self._record)
        for i in range(count):
            threading.Thread(
                target=_entry_point("help_programs"),
                args=(self.address,),
                name=f"vllm-kernels-{i + 1}",
                daemon=True,
            ).start()

    @staticmethod
    @cache
    def of(threads: int) -> _Helpers | None:
        """Those that make up `threads` with the one that runs a program."""
        return _Helpers(threads - 1) if threads > 1 else None

# SPDX-License-Identifier: Apache-2.0
"""A decode step as one program: what it launches is noted once, and run again without Python.

    run() -> rms_norm | packed_gemm | rotary | plan | attend | ...      noted: (kernel, arguments)
    replay:  every thread walks that list; the last to leave an entry opens the next

Noting runs no kernel: what `run` returns is written by the first replay. Its tensors come from an
arena, in which memory is used again as soon as its tensor is gone, as `run` would do it; so they
must not be read by the host, and only kernels may compute. See program_kernels.py for how threads
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

from vllm.platforms.static_graph import StaticGraph

from . import program_args as A
from .kernel_library import KernelLibrary
from .threads import Recorder, num_threads, record

_LIBRARY = KernelLibrary("vllm.model_executor.layers.cpu_ops.program_kernels")
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

    @staticmethod
    def outlived(tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which another tensor may get as soon as `tensor` is gone."""
        raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + nbytes]


_arena = _Arena()


class _Allocations(TorchDispatchMode):
    """Sends a recording's tensors to the arena, lets views pass, and refuses what torch computes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
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


class KernelProgram(StaticGraph):
    """What `run` launches, in order, on all threads of `init_threads`.

    Raises:
        RuntimeError: something else than kernels computes in `run`.
    """

    records_on_demand = True

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        recorder = Recorder()
        with record(recorder), _Allocations():
            output = run()
        if not recorder.entries:
            raise RuntimeError("nothing was launched")
        if not output.is_contiguous():
            raise RuntimeError(f"its result has gaps: strides {output.stride()}")
        # It holds until the next replay, of whichever program: so these share its memory.
        self._output = _arena.outlived(output)
        self._kept = recorder.kept, [args for _, args, *_ in recorder.entries]
        self._names = [kernel.name for kernel, *_ in recorder.entries]
        self._record, self._entries = _program_record(recorder)
        self._helpers = _Helpers.of(num_threads())
        address = self._helpers.address if self._helpers else 0
        self._args = (ctypes.c_int64 * 3)(self._record.ctypes.data, address, 0)
        self._args_address = ctypes.addressof(self._args)
        self._run = _entry_point("run_program")

    def replay(self) -> torch.Tensor:
        self._run(self._args_address)
        return self._output

    def cycles(self) -> list[tuple[str, int]]:
        """(kernel, ticks of the time stamp counter) of each entry in the last replay."""
        ended = self._entries[:, A.ENDED // 8].tolist()
        began = [self._args[2], *ended]
        return [(name, end - start) for name, start, end in zip(self._names, began, ended)]


def _program_record(recorder: Recorder) -> tuple[np.ndarray, np.ndarray]:
    """(the program's words, its entries) as program_args.py lays them out."""
    count = len(recorder.entries)
    raw = _aligned(A.PROGRAM_BYTES).view(np.int64)
    entries = _aligned(count * A.ENTRY_BYTES).view(np.int64).reshape(count, -1)
    for entry, (kernel, args, serial, counters) in zip(entries, recorder.entries):
        entry[A.KERNEL // 8], entry[A.ARGS // 8] = kernel.address, args.address
        entry[A.SERIAL // 8], entry[A.COUNTERS // 8] = serial, counters
    raw[A.ENTRIES // 8], raw[A.NUM_ENTRIES // 8] = entries.ctypes.data, count
    raw[A.STATE // 8] = count << A.ACTIVE_BITS
    _set_waiting(raw)
    # A helper that comes late still looks at these words, after the program itself is gone.
    _Helpers.outlived += (raw, entries)
    return raw, entries


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
    address = lambda name: ctypes.cast(getattr(libc, name), ctypes.c_void_p).value  # noqa: E731
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
    address = _LIBRARY.load("float32")[name].address
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Helpers:
    """Threads that help with programs, asleep in between. They end with the process."""

    outlived: list[np.ndarray] = []

    def __init__(self, count: int) -> None:
        self._record = _aligned(A.HELPERS_BYTES).view(np.int64)
        self.address = self._record.ctypes.data
        _set_waiting(self._record)
        self.outlived.append(self._record)
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

# SPDX-License-Identifier: Apache-2.0
"""A graph of the emulated device: launches are recorded and launched again, and no more.

As a device's graph it keeps addresses, launch sizes and numbers of the host, runs no Python of what was
recorded, and refuses to let the host read a tensor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from vllm.platforms.static_graph import StaticGraph

_READS_OF_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Recorder(TorchDispatchMode):
    """Notes each operation of torch, and each launch of a Triton kernel, after it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func in _READS_OF_THE_HOST:
            raise RuntimeError(f"{func} while a graph is recorded: the host waits for the device")
        out = func(*args, **(kwargs or {}))
        self.launches.append(partial(_run_again, func, args, kwargs or {}, tree_leaves(out)))
        return out

    def launch_kernel(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        """Instead of `GridExecutor.__call__`."""
        run = partial(_launch, executor, *args, **kwargs)
        with _disable_current_modes():
            run()
        self.launches.append(run)


_launch = GridExecutor.__call__


def _run_again(func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
    """Runs an operation and leaves its results where the recorded ones were."""
    for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class RecordedGraph(StaticGraph):
    """What `run` launched."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        run()
        recorder = _Recorder()
        instead = lambda *args, **kwargs: recorder.launch_kernel(*args, **kwargs)  # noqa: E731
        with mock.patch.object(GridExecutor, "__call__", instead), recorder:
            self._output = run()
        self._launches = recorder.launches

    def replay(self) -> torch.Tensor:
        for launch in self._launches:
            launch()
        return self._output

# SPDX-License-Identifier: Apache-2.0
"""Work of a device that is recorded once and replayed. A platform names its class in
`get_static_graph_wrapper_cls`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch


class StaticGraph(ABC):
    """What `run` does on the device, as it did it when this was made: the same kernels, launch sizes,
    numbers and addresses. Only what lies at those addresses may change, and no Python runs.

    Args:
        run: called at least once; nothing in it may wait for the device. What it returns must stay
            in place: each replay writes there.

    Raises:
        RuntimeError: `run` did what cannot be recorded.
    """

    records_on_demand: ClassVar[bool] = False
    """Whether recording takes so little time and memory that it is done for every size of batch, when
    the first of that size comes; and where it fails the work goes on unrecorded."""

    @abstractmethod
    def __init__(self, run: Callable[[], torch.Tensor]) -> None: ...

    @abstractmethod
    def replay(self) -> torch.Tensor:
        """Queues the recorded work; returns what `run` returned, written anew. It holds until a graph
        is replayed again."""


class TorchCUDAGraph(StaticGraph):
    """A `torch.cuda.CUDAGraph`, of NVIDIA and of AMD GPUs. All share one pool of memory, since no two
    run at once. Untested on devices."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        # Kernels are compiled and libraries make their handles before the recording, where neither may.
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile does not concern the recording.
        with torch.cuda.graph(self._graph, pool=_pool(), capture_error_mode="thread_local"):
            self._output = run()

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._output


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()

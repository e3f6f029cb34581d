# SPDX-License-Identifier: Apache-2.0
"""Work of a device that is recorded once and replayed. A platform names its class in
`get_static_graph_wrapper_cls`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

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

    @abstractmethod
    def __init__(self, run: Callable[[], torch.Tensor]) -> None: ...

    @abstractmethod
    def replay(self) -> torch.Tensor:
        """Queues the recorded work; returns what `run` returned, written anew. It holds until a graph
        is replayed again."""


class SizedGraph(ABC):
    """As `StaticGraph`, and one recording serves every smaller batch: prompts, single tokens and both
    together.

    Args:
        run: what works on `num_tokens` tokens of `num_reqs` requests; the rows of what it returns are
            the tokens.

    Raises:
        RuntimeError: `run` did what cannot be recorded.
    """

    @abstractmethod
    def __init__(
        self, run: Callable[[], torch.Tensor], num_tokens: int = 1, num_reqs: int = 1
    ) -> None: ...

    @abstractmethod
    def replay(self, num_tokens: int | None = None, num_reqs: int | None = None) -> torch.Tensor:
        """The recorded work for so many tokens and requests, by default all. What it returns holds
        until this graph is replayed again."""

    @property
    @abstractmethod
    def output(self) -> torch.Tensor:
        """What `run` returned: replays write its first rows."""


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

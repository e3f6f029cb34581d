# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at the moment: how fast memory is read, how fast bfloat16 matrices
are multiplied. Machines that are shared drift, so a bound is measured in the run it bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_READ_BYTES = 1 << 29
_READ_COLUMNS = 1024
_GEMM_ROWS = (8, 64, 2048)
_GEMM_SIZE = 2048
_TRIES = 4
_GEMM_SECONDS = 0.05


@dataclass(frozen=True)
class Bounds:
    """read_bytes_per_s: main memory, all threads. gemm_flops_per_s: (rows, rate) of bfloat16
    products with a square weight, torch's or ours, whichever is the faster."""

    read_bytes_per_s: float
    gemm_flops_per_s: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class BoundsSpec:
    """A probe in a process like the engines', asked between their rounds."""

    name: str = "bounds"
    is_peer: bool = False

    def build(self) -> BoundsProbe:
        return BoundsProbe()


class BoundsProbe:
    """Keeps its buffers, so that measuring takes well under a second."""

    name = "bounds"

    def __init__(self) -> None:
        import torch

        from vllm.model_executor.layers import cpu_ops
        from vllm.platforms.cpu_threads import plan_threads

        cpu_ops.init_threads(plan_threads().num_threads)
        self._big = torch.ones(_READ_BYTES // 4 // _READ_COLUMNS, _READ_COLUMNS)
        self._narrow = torch.ones(_READ_BYTES // 2 // _READ_COLUMNS, _READ_COLUMNS).bfloat16()
        self._vector = torch.ones(1, _READ_COLUMNS, dtype=torch.bfloat16)
        self._square = torch.randn(_GEMM_SIZE, _GEMM_SIZE).bfloat16()
        can_pack = cpu_ops.can_pack(self._square)
        self._packed = cpu_ops.pack(self._square) if can_pack else None

    def measure(self) -> Bounds:
        """Best of several tries each: a bound is not a median."""
        from vllm.model_executor.layers import cpu_ops

        read = min(
            _best(lambda: self._big.sum()),
            _best(lambda: cpu_ops.gemv(self._vector, self._narrow)),
        )
        products = tuple((rows, self._gemm(rows)) for rows in _GEMM_ROWS)
        return Bounds(_READ_BYTES / read, products)

    def _gemm(self, rows: int) -> float:
        import torch
        import torch.nn.functional as F

        from vllm.model_executor.layers import cpu_ops

        x = torch.randn(rows, _GEMM_SIZE).bfloat16()
        products = [lambda: F.linear(x, self._square)]
        if self._packed is not None:
            products.append(lambda: cpu_ops.linear(x, self._packed))
        for product in products:
            product()
        seconds = min(_best(product, until=_GEMM_SECONDS) for product in products)
        return 2 * rows * _GEMM_SIZE**2 / seconds


def _best(function: Callable[[], object], until: float = 0.0) -> float:
    """Seconds of the fastest of a few calls, more of them until `until` seconds have passed."""
    best, began, tries = float("inf"), time.perf_counter(), 0
    while tries < _TRIES or time.perf_counter() - began < until:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        tries += 1
    return best

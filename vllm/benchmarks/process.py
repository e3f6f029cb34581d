# SPDX-License-Identifier: Apache-2.0
"""An engine under test in a process of its own, so that no engine's libraries touch another's."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from vllm import env_override
from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.engine import BenchEngineSpec, EngineInfo, Run
from vllm.benchmarks.workload import Workload
from vllm.logger import init_logger
from vllm.platforms.cpu_threads import plan_threads

logger = init_logger(__name__)

_STOP_TIMEOUT_S = 20.0
_BUSY_SAMPLE_S = 1.0
_BUSY_PERCENT = 10.0


class EngineFailed(RuntimeError):
    """An engine under test raised or died; one line. Its traceback is in the debug log."""


@dataclass(frozen=True)
class _Failure:
    """What the process sends back instead of an answer."""

    message: str
    trace: str


class EngineProcess:
    """Has the engine of `spec` built in a new process; its methods are the engine's.

    The process computes with the threads that VLLM_CPU_OMP_THREADS_BIND and OMP_NUM_THREADS ask
    for, on the same cores, whatever the engine.

    Raises:
        EngineFailed: by each method, when the engine raised or its process died.
    """

    def __init__(self, spec: BenchEngineSpec) -> None:
        self.name = spec.name
        self.ready_seconds: float | None = None
        self._began = time.perf_counter()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, theirs))
        with _child_environment():
            self._process.start()
        theirs.close()

    def wait_until_built(self) -> None:
        """Returns when the model is loaded."""
        self._receive()
        self.ready_seconds = time.perf_counter() - self._began

    @property
    def is_built(self) -> bool:
        """Whether the model was loaded."""
        return self.ready_seconds is not None

    def prepare(self, workload: Workload) -> None:
        self._call("prepare", workload)

    def run(self, workload: Workload) -> Run:
        return self._call("run", workload)

    def info(self) -> EngineInfo:
        return self._call("info")

    def weight_bytes(self) -> int:
        """Bytes of the model's parameters; our engine knows them."""
        return self._call("weight_bytes")

    def bounds(self) -> Bounds:
        """The machine's, of a `BoundsProbe`."""
        return self._call("measure")

    def peak_memory_bytes(self) -> int:
        """Resident memory at its highest, of the process and those that it started."""
        process = psutil.Process(self._process.pid)
        return sum(_peak_bytes(each.pid) for each in (process, *process.children(recursive=True)))

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, method: str, *args: Any) -> Any:
        try:
            self._connection.send((method, args))
        except OSError:
            pass  # it is dead: receiving says so, after what it had to say
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_STOP_TIMEOUT_S)
            raise EngineFailed(
                f"the process of {self.name} ended with exit status {self._process.exitcode}"
            ) from None
        if isinstance(answer, _Failure):
            logger.debug("%s failed:\n%s", self.name, answer.trace)
            raise EngineFailed(f"{self.name}: {answer.message}")
        return answer


def warn_if_busy(busy_percent: float) -> None:
    """Warns that figures taken beside other work mean little, and compare even less: engines
    differ in how much they lose when a core is taken away."""
    if busy_percent > _BUSY_PERCENT:
        logger.warning(
            "other processes use %.0f %% of this machine's CPUs: figures taken now, ratios too, do "
            "not hold on a quiet one",
            busy_percent,
        )


def _peak_bytes(pid: int) -> int:
    """VmHWM; what is resident now where the system does not keep it, 0 if the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return psutil.Process(pid).memory_info().rss
    except (OSError, psutil.Error):
        return 0


@contextmanager
def engine_processes(
    specs: Sequence[BenchEngineSpec], may_fail: bool = False
) -> Iterator[list[EngineProcess]]:
    """A process for each spec, all loaded, one after the other; closed at the end. `may_fail`: a
    peer that cannot be loaded is warned of, and has `is_built` False."""
    warn_if_busy(psutil.cpu_percent(interval=_BUSY_SAMPLE_S))
    with ExitStack() as stack:
        engines = []
        for spec in specs:
            engine = EngineProcess(spec)
            stack.callback(engine.close)
            engines.append(engine)
            try:
                engine.wait_until_built()
            except EngineFailed as error:
                if not (may_fail and spec.is_peer):
                    raise
                logger.warning("left out: %s", error)
        yield engines


@contextmanager
def _child_environment() -> Iterator[None]:
    """The user's environment and the number of threads: OpenMP reads both once, when loaded."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(plan_threads().num_threads)
    for name in env_override.changed:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(spec: BenchEngineSpec, connection: Connection) -> None:
    """The process: builds the engine, then answers calls until the other end is closed."""
    if spec.is_peer:  # what suits us may not suit it
        for name in env_override.changed:
            os.environ.pop(name, None)
    plan = plan_threads()
    try:
        if plan.bind:
            os.sched_setaffinity(0, plan.cpus)
    except (OSError, AttributeError):
        pass  # free to move then, as the other engines are
    try:
        engine = spec.build()
        connection.send(None)
        while True:
            method, args = connection.recv()
            connection.send(getattr(engine, method)(*args))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        connection.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))

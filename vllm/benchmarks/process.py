# SPDX-License-Identifier: Apache-2.0
"""An engine under test in a process of its own, so that no engine's libraries touch another's."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
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
_BUILD_TIMEOUT_S = 900.0
_BUSY_SAMPLE_S = 1.0
_BUSY_PERCENT = 10.0


class EngineFailed(RuntimeError):
    """An engine under test raised or died; one line. Its traceback is in the debug log."""


def reason(error: Exception) -> str:
    """One line of it; what is not meant for a user is named by its type too."""
    text = " ".join(str(error).split())
    if isinstance(error, (EngineFailed, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class _Failure:
    """What the process sends back instead of an answer."""

    message: str
    trace: str


class EngineProcess:
    """Has the engine of `spec` built in a new process; its methods are the engine's.

    The process computes with the threads that VLLM_CPU_OMP_THREADS_BIND and OMP_NUM_THREADS ask
    for, on the same cores, whatever the engine. `timeout_s`: longest time of a call; None: any.

    Raises:
        EngineFailed: by each method, when the engine raised, its process died or gave no answer in
            time; it is ended then.
    """

    def __init__(self, spec: BenchEngineSpec, timeout_s: float | None = None) -> None:
        self.name = spec.name
        self._timeout_s = timeout_s
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
        self._receive(_BUILD_TIMEOUT_S)
        self.ready_seconds = time.perf_counter() - self._began

    def prepare(self, workload: Workload) -> None:
        self.call("prepare", workload)

    def run(self, workload: Workload) -> Run:
        return self.call("run", workload)

    def info(self) -> EngineInfo:
        return self.call("info")

    def bounds(self) -> Bounds:
        """The machine's, of a `BoundsProbe`."""
        return self.call("measure")

    def peak_memory_bytes(self) -> int:
        """Resident memory at its highest, of the process and those that it started.

        Raises:
            EngineFailed: the process is gone.
        """
        try:
            process = psutil.Process(self._process.pid)
            started = process.children(recursive=True)
        except psutil.Error as error:
            raise EngineFailed(f"{self.name}: {error}") from None
        return sum(_peak_bytes(each.pid) for each in (process, *started))

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._kill()

    def call(self, method: str, *args: Any) -> Any:
        """What that method of the engine returns."""
        try:
            self._connection.send((method, args))
        except OSError:
            pass  # it is dead: receiving says so, after what it had to say
        return self._receive(self._timeout_s)

    def _kill(self) -> None:
        """Ends the process and those that it started."""
        try:
            started = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            started = []
        self._process.kill()
        self._process.join()
        for process in started:
            try:
                process.kill()
            except psutil.Error:
                pass  # it has ended

    def _receive(self, timeout_s: float | None) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                self._kill()
                raise EngineFailed(f"{self.name} gave no answer within {timeout_s:g} s")
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
    specs: Iterable[BenchEngineSpec],
    on_failure: Callable[[str, str], None] | None = None,
    timeout_s: float | None = None,
    on_step: Callable[[str], None] = lambda what: None,
) -> Iterator[list[EngineProcess]]:
    """A process for each spec, all loaded, one after the other; closed at the end.

    `on_failure`, called with a name and a line, makes it go on without an engine that cannot be
    loaded; None: that is raised. `timeout_s`: longest time of a call to an engine."""
    warn_if_busy(psutil.cpu_percent(interval=_BUSY_SAMPLE_S))
    with ExitStack() as stack:
        engines = []
        for spec in specs:
            on_step(f"{spec.name}: loading")
            engine = EngineProcess(spec, timeout_s)
            stack.callback(engine.close)
            try:
                engine.wait_until_built()
                engines.append(engine)
            except EngineFailed as error:
                if on_failure is None:
                    raise
                on_failure(spec.name, reason(error))
        yield engines


def plain_environment() -> dict[str, str]:
    """The user's environment and the number of threads, without what we set for ourselves."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan_threads().num_threads)}
    for name in env_override.changed:
        environment.pop(name, None)
    return environment


@contextmanager
def _child_environment() -> Iterator[None]:
    """`plain_environment` for processes started inside: OpenMP reads it once, when loaded."""
    before, plain = dict(os.environ), plain_environment()
    os.environ.clear()
    os.environ.update(plain)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(spec: BenchEngineSpec, connection: Connection) -> None:
    """The process: builds the engine, then answers calls until the other end is closed. A call that
    raises ends nothing: what an engine cannot do of one workload it may do of the next."""
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
    except Exception as error:
        connection.send(_failure(error))
        return
    try:
        connection.send(None)
        while True:
            method, args = connection.recv()
            try:
                answer = getattr(engine, method)(*args)
            except Exception as error:
                answer = _failure(error)
            connection.send(answer)
    except (EOFError, KeyboardInterrupt):
        return


def _failure(error: Exception) -> _Failure:
    return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())

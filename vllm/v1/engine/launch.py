# SPDX-License-Identifier: Apache-2.0
"""Starts the engine core's process, early: it loads torch and the model's code while the front is
still making its config.

    process = launch_engine_core()          # as soon as there is something to serve
    process.send_config(vllm_config)        # loading begins
    ready = process.wait_until_ready()      # the clients do this

Between the two processes lie a socket pair for the start, which doubles as a lifeline (whoever
reads its end knows that the other has gone), and two ZMQ sockets for the work. The ZMQ files lie in
a private folder that is removed as soon as both sides are connected.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.startup_timer import StartupPhase, startup_timer
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.core_main import SHUTDOWN
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

logger = init_logger(__name__)

# sun_path holds 108 bytes; the socket's name takes some.
_MAX_FOLDER_LENGTH = 90


@dataclass(frozen=True)
class EngineCoreStart:
    """What the engine core's process is sent first."""

    vllm_config: VllmConfig
    executor_class: type[Executor] | None
    log_stats: bool
    input_address: str
    output_address: str
    environ: dict[str, str]


@dataclass(frozen=True)
class EngineCoreStartFailure:
    """What comes back when the engine core could not start. `is_user_error`: `message` says what
    to change; no traceback was logged."""

    kind: str
    message: str
    is_user_error: bool


class EngineCoreReady(msgspec.Struct):
    """What comes back through ZMQ when it could."""

    response: EngineCoreReadyResponse
    phases: list[StartupPhase] = msgspec.field(default_factory=list)


def launch_engine_core() -> EngineCoreProcess:
    """Starts the process; it begins with loading code. Imports no torch here."""
    began = time.monotonic()
    parent = None if len(tempfile.gettempdir()) < _MAX_FOLDER_LENGTH else "/tmp"
    folder = tempfile.mkdtemp(prefix="vllm-", dir=parent)
    ours, theirs = socket.socketpair()
    # The same search path, so that plugins and classes of the caller are found there too; the
    # caller's main module is not run again.
    command = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from vllm.v1.engine.core_main import main; main({theirs.fileno()}, {folder!r})"
    )
    prefix = os.environ.get("VLLM_LOGGING_PREFIX", "")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "VLLM_LOGGING_PREFIX": f"{prefix}(EngineCore) "},
        )
    startup_timer.record("launch", began)
    resources = _Resources(process, Connection(ours.detach()), folder)
    return EngineCoreProcess(resources, dict(os.environ))


@dataclass
class _Resources:
    """What must be let go of when the front ends, in whatever way; knows nothing of its owner."""

    process: subprocess.Popen
    control: Connection
    folder: str
    is_shut_down: bool = False

    def release(self, timeout_s: float = 5.0) -> None:
        """Asks the process to end, waits for that, and insists."""
        if self.is_shut_down:
            return
        self.is_shut_down = True
        try:
            self.control.send_bytes(SHUTDOWN)
        except OSError:
            pass  # It has gone already.
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the engine core did not end within %.0f s; killing it", timeout_s)
            self.process.kill()
            self.process.wait()
        self.control.close()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Removes the ZMQ files; connected sockets go on without them."""
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineCoreProcess:
    """The engine core's process, seen from the front."""

    def __init__(self, resources: _Resources, environ: dict[str, str]) -> None:
        self._process = resources.process
        self._control = resources.control
        self._environ = environ
        self._resources = resources
        self._finalizer = weakref.finalize(self, self._resources.release)
        self._is_config_sent = False
        self.vllm_config: VllmConfig | None = None
        self.input_socket: zmq.Socket | None = None
        # The owner closes; `output_socket` is a view of it for callers that wait. Were a view closed,
        # its owner would later close whatever socket has got the same address by then.
        self.output_owner: zmq.asyncio.Socket | None = None
        self.output_socket: zmq.Socket | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_config_sent(self) -> bool:
        """Whether loading has begun."""
        return self._is_config_sent

    def send_config(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
    ) -> None:
        """Lets loading begin. May be called before the process is up.

        Raises:
            ValueError: the config holds something that cannot be sent to another process.
        """
        self.vllm_config = vllm_config
        self._bind_sockets()
        # What the platform's config hook changed in the environment since the launch.
        changed = {k: v for k, v in os.environ.items() if self._environ.get(k) != v}
        start = EngineCoreStart(
            vllm_config=vllm_config,
            executor_class=executor_class,
            log_stats=log_stats,
            input_address=self._address("in"),
            output_address=self._address("out"),
            environ=changed,
        )
        try:
            message = pickle.dumps(start)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the config cannot be sent to the engine's process: {error}; classes in it must "
                "be importable by name"
            ) from error
        try:
            self._control.send_bytes(message)
        except OSError:
            raise self._died_at_start() from None
        # Tells the other side that its input is connected.
        self.input_socket.send(b"hello")
        self._is_config_sent = True

    def _bind_sockets(self) -> None:
        # The process's own context: it is never terminated, which could wait for ever for a socket.
        context = zmq.Context.instance()
        self.input_socket = context.socket(zmq.PUSH)
        self.output_owner = zmq.asyncio.Socket(context, zmq.PULL)
        self.output_socket = zmq.Socket.shadow(self.output_owner.underlying)
        for made in (self.input_socket, self.output_socket):
            # No limits: the scheduler's queue is the place where requests wait. No lingering: what
            # a dead engine did not take is of no use.
            made.setsockopt(zmq.SNDHWM, 0)
            made.setsockopt(zmq.RCVHWM, 0)
            made.setsockopt(zmq.LINGER, 0)
        # Connected before the other side is bound, so that a send need not wait for a peer.
        self.input_socket.connect(self._address("in"))
        self.output_socket.bind(self._address("out"))
        self.output_socket.bind(_death_address(self.pid))

    def _address(self, name: str) -> str:
        return f"ipc://{self._resources.folder}/{name}"

    def wait_until_ready(self) -> EngineCoreReadyResponse:
        """Waits until the engine core takes requests; says from time to time that it is waiting.

        Raises:
            ValueError: it cannot serve this config; the message says what to change.
            RuntimeError: it could not start; its traceback is in the log.
        """
        poller = zmq.Poller()
        poller.register(self.output_socket, zmq.POLLIN)
        poller.register(self._control.fileno(), zmq.POLLIN)
        began = time.monotonic()
        with startup_timer.phase("wait for engine"):
            while not (events := dict(poller.poll(10_000))):
                logger.info("still loading the model after %.0f s", time.monotonic() - began)
        if self.output_socket not in events:
            self._raise_failure()
        ready = msgspec.msgpack.decode(self.output_socket.recv(), type=EngineCoreReady)
        self._resources.remove_folder()
        startup_timer.add(ready.phases)
        self._take_over(ready.response)
        return ready.response

    def _take_over(self, ready: EngineCoreReadyResponse) -> None:
        """What the engine core has found out goes into the config of this process too."""
        config = self.vllm_config
        config.model_config.max_model_len = ready.max_model_len
        config.cache_config.num_gpu_blocks = ready.num_gpu_blocks
        config.cache_config.block_size = ready.block_size
        config.cache_config.kv_cache_size_tokens = ready.kv_cache_size_tokens
        config.cache_config.kv_cache_max_concurrency = ready.kv_cache_max_concurrency
        config.seal()

    def _raise_failure(self) -> None:
        try:
            failure = self._control.recv()
        except (EOFError, OSError):
            raise self._died_at_start() from None
        self.shutdown()
        self.close_sockets()
        if failure.is_user_error:
            raise ValueError(failure.message)
        raise RuntimeError(
            f"the engine core could not start: {failure.kind}: {failure.message} (its traceback is "
            "in the log above)"
        )

    def _died_at_start(self) -> RuntimeError:
        self.shutdown()
        self.close_sockets()
        return RuntimeError(
            f"the engine core ended while it started ({_how_it_ended(self._process.returncode)}); "
            "the log above says why, unless it was killed"
        )

    def watch(self, on_death: Callable[[EngineDeadError], None]) -> None:
        """Calls `on_death`, in a thread of its own, when the process ends before `shutdown`. Also
        wakes whoever reads `output_socket`, with an empty message."""
        args = (self._process, self._resources, on_death)
        threading.Thread(target=_watch, args=args, name="engine-core-watch", daemon=True).start()

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Ends the process: gently, and after `timeout_s` by force. May be called twice."""
        self._resources.release(timeout_s)
        self._finalizer.detach()

    def close_sockets(self) -> None:
        """Closes both sockets. Only in the thread that uses them."""
        for made in (self.input_socket, self.output_owner):
            if made is not None and not made.closed:
                made.close()


def _watch(
    process: subprocess.Popen,
    resources: _Resources,
    on_death: Callable[[EngineDeadError], None],
) -> None:
    returncode = process.wait()
    resources.remove_folder()
    if resources.is_shut_down:
        return
    how = _how_it_ended(returncode)
    logger.error("the engine core's process %d has ended (%s)", process.pid, how)
    on_death(EngineDeadError(how))
    with zmq.Context.instance().socket(zmq.PUSH) as waker:
        waker.connect(_death_address(process.pid))
        waker.send(b"")


def _death_address(pid: int) -> str:
    return f"inproc://engine-core-{pid}-death"


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "closed its connection"
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"

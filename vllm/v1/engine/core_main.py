# SPDX-License-Identifier: Apache-2.0
"""The engine core's process: loads code while it waits for the config, then serves until its front
says so or is gone.

Importing this module imports next to nothing: the first thing that runs is the watch over the
front.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core_proc import EngineCoreProc
    from vllm.v1.engine.launch import EngineCoreStart

# In the order of need: each brings others with it. What a device has no use for is small.
PRELOADED = (
    "vllm.config",
    "vllm.v1.engine.core_proc",
    "torch",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models",
)
# What the front sends to end this process.
SHUTDOWN = b"shutdown"
# A step may be running when the front goes; after that long it is not waited for.
_GRACE_S = 5.0


class Lifeline:
    """The connection to the front. A thread reads it: the config first, then the word to shut down,
    or the end of the front. Before there is an engine to shut down, both end the process."""

    def __init__(self, control: Connection, folder: str) -> None:
        self.control = control
        self._folder = folder
        self.starts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._engine: EngineCoreProc | None = None
        self._is_over = threading.Event()
        self._front_pid = os.getppid()
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()

    def attach(self, engine: EngineCoreProc) -> None:
        """From now on `engine` is asked to shut down instead."""
        self._engine = engine
        if self._is_over.is_set():
            os._exit(0)

    def _read(self) -> None:
        try:
            first = self.control.recv_bytes()
            if first == SHUTDOWN:
                self._end()  # The front ends before it had a config.
            self.starts.put(first)
            # A process that the front forked may hold the other end open, so that its end would not
            # be seen here: look for a new parent too.
            while not self.control.poll(1.0):
                if os.getppid() != self._front_pid:
                    break
            # Whatever it is, it is the word to shut down.
        except (EOFError, OSError):
            pass
        self._end()

    def _end(self) -> None:
        self._is_over.set()
        if self._engine is not None:
            self._engine.request_shutdown()
            time.sleep(_GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def main(control_fd: int, folder: str) -> None:
    """Entry of the process: its end of the socket pair, and the folder of the ZMQ files."""
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group. The front drains
    # its requests first, and then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline = Lifeline(Connection(control_fd), folder)
    _name_this_process()
    status = 1
    try:
        status = _run(lifeline)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing is left to tidy up, and threads of libraries must not hold us.
        os._exit(status)


def _name_this_process() -> None:
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write("VLLM::EngineCore"[:15])
    except OSError:
        pass  # Only for `ps`.


def _run(lifeline: Lifeline) -> int:
    """The exit status."""
    preload()
    start = _receive_start(lifeline)
    engine = _start_engine(start, lifeline)
    if engine is None:
        return 1
    lifeline.attach(engine)
    return engine.run()


def preload() -> None:
    """Imports what any engine needs. What cannot be imported fails again, with its reason, where it
    is needed."""
    from vllm.utils.startup_timer import startup_timer

    startup_timer.process = "engine"
    startup_timer.record("python", startup_timer.began)
    for name in PRELOADED:
        with startup_timer.phase(f"import {name.removeprefix('vllm.')}"):
            try:
                importlib.import_module(name)
            except Exception:
                from vllm.logger import init_logger

                init_logger(__name__).debug("%s cannot be loaded early", name, exc_info=True)


def _receive_start(lifeline: Lifeline) -> EngineCoreStart:
    from vllm.logger import LOG_LEVELS, set_log_level
    from vllm.utils.startup_timer import startup_timer

    with startup_timer.phase("wait for config"):
        message = lifeline.starts.get()
    start: EngineCoreStart = pickle.loads(message)
    os.environ.update(start.environ)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "").lower()
    if level in LOG_LEVELS:
        set_log_level(level)
    return start


def _start_engine(start: EngineCoreStart, lifeline: Lifeline) -> EngineCoreProc | None:
    from vllm.logger import init_logger
    from vllm.v1.engine.core_proc import EngineCoreProc
    from vllm.v1.engine.launch import EngineCoreStartFailure

    try:
        return EngineCoreProc(start)
    except Exception as error:
        # ValueErrors are the user's, and say what to do; the front shows them.
        is_user_error = isinstance(error, ValueError)
        logger = init_logger(__name__)
        log = logger.debug if is_user_error else logger.error
        log("the engine core could not start", exc_info=True)
        failure = EngineCoreStartFailure(type(error).__name__, str(error), is_user_error)
        lifeline.control.send(failure)
        return None

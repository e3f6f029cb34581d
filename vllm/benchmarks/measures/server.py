# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, until /health answers and until it is ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil

from vllm.benchmarks.process import EngineFailed, plain_environment
from vllm.engine.arg_utils import EngineArgs

_POLL_S = 0.02
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Server:
    """One that answers. `ready_seconds`: from the start of its process to the first 200."""

    port: int
    ready_seconds: float


@dataclass(frozen=True)
class ServerCommand:
    """How to start one; the port is added. `cwd` None: here."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str | None = None


def our_server(engine_args: EngineArgs) -> ServerCommand:
    """`vllm serve` of this project, its settings the user's defaults."""
    flags = [f"--dtype={engine_args.dtype}"]
    if engine_args.max_model_len is not None:
        flags.append(f"--max-model-len={engine_args.max_model_len}")
    if engine_args.quantization is not None:
        flags.append(f"--quantization={engine_args.quantization}")
    if engine_args.skip_tokenizer_init:
        flags.append("--skip-tokenizer-init")
    module = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", engine_args.model)
    return ServerCommand((*module, *flags), plain_environment())


@contextmanager
def running(server: ServerCommand, name: str, timeout_s: float) -> Iterator[Server]:
    """The server, ready; ended with all that it started.

    Raises:
        EngineFailed: it ended, or was not ready in time; with the last line that it wrote.
    """
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*server.command, "--host=127.0.0.1", f"--port={port}"],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=dict(server.environment),
            cwd=server.cwd,
        )
        try:
            while not _is_healthy(port):
                if process.poll() is not None or time.perf_counter() - began > timeout_s:
                    raise EngineFailed(f"{name} is not ready: {_last_line(log)}")
                time.sleep(_POLL_S)
            yield Server(port, time.perf_counter() - began)
        finally:
            _end(process)


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_line(log) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def _end(process: subprocess.Popen) -> None:
    """By SIGTERM; by force, its children too, where that is not enough."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        started = []
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(started, timeout=1)[1]:
        try:
            child.kill()
        except psutil.Error:
            pass  # it has ended


def with_cold_caches(server: ServerCommand, folder: Path) -> ServerCommand:
    """The same with `folder`, an empty one, where compiled code is kept."""
    variables = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR")
    cold = {name: os.path.join(folder, name.lower()) for name in variables}
    return ServerCommand(server.command, {**server.environment, **cold}, server.cwd)

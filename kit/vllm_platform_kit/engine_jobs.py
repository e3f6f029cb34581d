# SPDX-License-Identifier: Apache-2.0
"""Runs of an engine, each in a child process: one that dies or hangs is a result as any other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO

RESULT = "VLLM-PLATFORM-KIT-RESULT "
CHILD = (sys.executable, "-m", "vllm_platform_kit.engine_run")
# For a start, all generations and the probes of one job.
SECONDS_PER_JOB = 600.0
_SECONDS_TO_END = 20
_SECONDS_BETWEEN_LOOKS = 1.0
# Stages of a job once the engine has started.
GENERATING, LOOKING = "while it generated", "while the kit looked at its caches"


@dataclass(frozen=True)
class Job:
    """A model of `tiny_models`, options of the engine, and whether a connector is registered."""

    model: str
    engine_args: dict = field(default_factory=dict)
    with_connector: bool = False
    with_probes: bool = True


@dataclass(frozen=True)
class Result:
    """status: ran, refused (the start ended with `error`), skipped (the engine lacks what `error`
    says), failed (`error` was raised once it had started, in `stage` at `place`; there are tokens if
    it came so far), died (or did not answer). findings: as (code, subject, what)."""

    status: str
    error: str = ""
    error_type: str = ""
    stage: str = ""
    place: str = ""
    expected: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    findings: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drawing: str = ""

    @property
    def is_refusal(self) -> bool:
        """Whether the start was refused on purpose, as far as the kind of error tells."""
        kinds = ("ValueError", "ValidationError", "NotImplementedError")
        return self.status == "refused" and self.error_type in kinds

    @property
    def told(self) -> str:
        """What ended it, in words: the error, in which stage and where it was raised."""
        where = f" ({self.place})" if self.place else ""
        stage = f", {self.stage}" if self.stage else ""
        return f"{self.error_type or self.status}{stage}: {self.error}{where}"


class Engines:
    """A child that does jobs one after the other, as many as it lives through.

    Args:
        folder: for checkpoints and the child's log.
        seconds: how long each job may take; then the child's whole process group is killed.
    """

    def __init__(self, folder: str, seconds: float = SECONDS_PER_JOB) -> None:
        self._folder = folder
        self._seconds = seconds
        self._child: subprocess.Popen | None = None
        self._done: dict[str, Result] = {}

    def run(self, job: Job) -> Result:
        """The job's result; each job is done once."""
        line = json.dumps(asdict(job))
        if line not in self._done:
            self._done[line] = self._run(line)
        return self._done[line]

    def close(self) -> None:
        """Ends the child."""
        if self._child is None:
            return
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._end(_SECONDS_TO_END)

    def _run(self, line: str) -> Result:
        child = self._start()
        with suppress(BrokenPipeError):
            child.stdin.write(line + "\n")
            child.stdin.flush()
        try:
            answer = self._answer(child)
        except queue.Empty:
            self._end(0)
            what = f"no answer within {self._seconds:g} s: {self._last_words()}"
            return Result("died", what)
        except BaseException:  # Ctrl-C does not reach a group of its own.
            self._end(0)
            raise
        if answer is not None:
            return Result(**json.loads(answer))
        code = self._end(_SECONDS_TO_END)
        return Result("died", f"the engine's process ended with status {code}: {self._last_words()}")

    def _answer(self, child: subprocess.Popen) -> str | None:
        """The result's line; None: the child has ended, even if one of its own holds its output.

        Raises:
            queue.Empty: neither came in time.
        """
        deadline = time.monotonic() + self._seconds
        while True:
            has_ended, left = child.poll() is not None, deadline - time.monotonic()
            try:
                said = self._said.get(timeout=min(max(left, 0), _SECONDS_BETWEEN_LOOKS))
            except queue.Empty:
                if has_ended:
                    return None
                if left <= 0:
                    raise
                continue
            if said is None:
                return None
            if said.startswith(RESULT):
                return said.removeprefix(RESULT)
            if left <= 0:
                raise queue.Empty

    def _start(self) -> subprocess.Popen:
        if self._child is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._log = os.path.join(self._folder, "engine.log")
            with open(self._log, "a") as log:
                self._child = subprocess.Popen(
                    [*CHILD, self._folder],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self._said: queue.Queue[str | None] = queue.Queue()
            self._reader = threading.Thread(
                target=_read, args=(self._child.stdout, self._said), daemon=True
            )
            self._reader.start()
        return self._child

    def _end(self, seconds: float) -> int:
        """Waits so long for the child, whose status it returns. Unless that is 0, its whole group is
        killed."""
        child, self._child = self._child, None
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)
        if child.returncode != 0:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        self._reader.join(timeout=_SECONDS_TO_END)
        return code

    def _last_words(self) -> str:
        with open(self._log) as log:
            lines = [line.strip() for line in log if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _read(stdout: IO[str], said: queue.Queue[str | None]) -> None:
    """All lines, and None behind the last: when nobody holds the other end any more."""
    for line in stdout:
        said.put(line)
    said.put(None)

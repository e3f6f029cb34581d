# SPDX-License-Identifier: Apache-2.0
"""Runs of an engine, each in a child process: one that dies is a result as any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field

RESULT = "VLLM-PLATFORM-KIT-RESULT "


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
    says), died. findings: as (code, subject, what)."""

    status: str
    error: str = ""
    error_type: str = ""
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


class Engines:
    """A child that does jobs one after the other, as many as it lives through."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
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
        self._child.stdin.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None

    def _run(self, line: str) -> Result:
        child = self._start()
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass
        for said in child.stdout:
            if said.startswith(RESULT):
                return Result(**json.loads(said.removeprefix(RESULT)))
        self._child = None
        code = child.wait()
        return Result("died", f"the engine's process ended with status {code}: {self._last_words()}")

    def _start(self) -> subprocess.Popen:
        if self._child is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._log = os.path.join(self._folder, "engine.log")
            with open(self._log, "a") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "vllm_platform_kit.engine_run", self._folder],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._child

    def _last_words(self) -> str:
        with open(self._log) as log:
            lines = [line.strip() for line in log if line.strip()]
        return lines[-1] if lines else "it said nothing"

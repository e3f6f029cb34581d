# SPDX-License-Identifier: Apache-2.0
"""Where the time of a start goes: phases of the front and of the engine process on one clock.

The monotonic clock is the machine's, so times of both processes can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec


class StartupPhase(msgspec.Struct, array_like=True, frozen=True):
    """A phase of the start of one process; times in seconds of the monotonic clock."""

    process: str
    name: str
    began: float
    ended: float

    @property
    def duration_ms(self) -> float:
        """How long it took, in milliseconds."""
        return (self.ended - self.began) * 1e3


def process_start_time() -> float:
    """When this process was started, on the monotonic clock; now where the system does not say."""
    try:
        with open("/proc/self/stat") as stat:
            # Fields after the command's name, which may hold spaces; the 22nd is the start in ticks
            # since boot (proc(5)).
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = since_boot - ticks / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - max(age, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()


class StartupTimer:
    """Collects the phases of a start. Phases may overlap: threads work side by side."""

    def __init__(self, process: str = "front") -> None:
        self.process = process
        self.began = process_start_time()
        self.phases: list[StartupPhase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what is inside as phase `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.record(name, began)

    def record(self, name: str, began: float, ended: float | None = None) -> None:
        """Adds a phase that began at `began` and ended at `ended`, or now."""
        self.phases.append(
            StartupPhase(self.process, name, began, time.monotonic() if ended is None else ended)
        )

    def add(self, phases: Iterable[StartupPhase]) -> None:
        """Takes in what another process measured."""
        self.phases.extend(phases)

    def table(self) -> str:
        """One line: for each process its phases in order, `name begin+duration` in ms since the
        start of this process."""
        total_ms = (time.monotonic() - self.began) * 1e3
        parts = [f"start took {total_ms:.0f} ms"]
        for process in dict.fromkeys(phase.process for phase in self.phases):
            own = sorted((p for p in self.phases if p.process == process), key=lambda p: p.began)
            said = (f"{p.name} {(p.began - self.began) * 1e3:.0f}+{p.duration_ms:.0f}" for p in own)
            parts.append(f"{process}: {', '.join(said)}")
        return " | ".join(parts)


startup_timer = StartupTimer()
"""This process's timer."""

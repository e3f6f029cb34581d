# SPDX-License-Identifier: Apache-2.0
"""Engines on the emulated platforms, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.plugins_tests.conftest import PluginSite
from tests.plugins_tests.emulated import Job, Result

PACKAGES = {"cpu": None, "rocm": "vllm_emulated_rocm", "cuda": "vllm_emulated_cuda"}


class Machine:
    """Processes on one platform; `package` None: the built-in one."""

    def __init__(self, folder: Path, package: str | None) -> None:
        folder.mkdir()
        self.site = PluginSite(folder)
        if package:
            self.site.install(package)

    def run(self, *jobs: Job) -> list[Result]:
        """The results of the jobs, which one process does one after the other."""
        env = {"TRITON_INTERPRET": "1", "VLLM_DEBUG_CHECK_INTEGRITY": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.plugins_tests.emulated"],
            input="\n".join(json.dumps(asdict(job)) for job in jobs),
            env=self.site._environment(env),
            cwd=self.site.folder,
            capture_output=True,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0 and len(lines) == len(jobs), done.stderr[-4000:]
        return [Result(**json.loads(line.removeprefix("RESULT "))) for line in lines]


def make_machines(folder: Path) -> dict[str, Machine]:
    """A machine for each platform."""
    return {name: Machine(folder / name, package) for name, package in PACKAGES.items()}

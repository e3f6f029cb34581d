# SPDX-License-Identifier: Apache-2.0
"""Plugins in processes of their own: what a plugin does to a process must not reach other tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OUT_OF_TREE_PACKAGES = REPOSITORY / "tests" / "plugins"
# Of the tests' own environment only this reaches the process: no plugin setting of a developer.
_DROPPED = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")


@dataclass(frozen=True)
class PluginSite:
    """A folder that stands for site-packages, and processes that see it."""

    folder: Path

    def add(self, name: str, group: str, source: str, entry: str = "register") -> None:
        """A one-module package with one entry point, called `name` as well."""
        module = f"plugin_{name}"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        self._write_metadata(module, {group: {name: f"{module}:{entry}"}})

    def install(self, package: str) -> None:
        """The package `tests/plugins/<package>`, with the entry points of its pyproject.toml."""
        source = OUT_OF_TREE_PACKAGES / package
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        shutil.copytree(source / package, self.folder / package)
        self._write_metadata(project["name"], project["entry-points"])

    def _write_metadata(self, name: str, groups: dict[str, dict[str, str]]) -> None:
        metadata = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs `code` in a new process that has the plugins installed."""
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=self._environment(env),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )

    @contextmanager
    def running(self, *command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        """A process that sees the plugins and is told to end afterwards; it writes to `log`."""
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=self._environment(env),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()

    @property
    def log(self) -> Path:
        """What the last `running` process wrote."""
        return self.folder / "log"

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        return kept | {"PYTHONPATH": f"{self.folder}{os.pathsep}{REPOSITORY}"} | env

    def output(self, code: str, **env: str) -> str:
        """What `code` prints; it must end well."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def last_error(self, code: str, **env: str) -> str:
        """The last line of the traceback that `code` must end with."""
        done = self.run(code, **env)
        assert done.returncode != 0, done.stdout
        return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path) -> PluginSite:
    folder = tmp_path / "site"
    folder.mkdir()
    return PluginSite(folder)

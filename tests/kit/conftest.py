# SPDX-License-Identifier: Apache-2.0
"""The kit as its users have it: built with its geometry inside, its entry points known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"
# What the package is built from.
SOURCES = ("kit", "vllm/v1/kv_cache_geometry", "vllm/v1/worker", "vllm/utils")


@dataclass(frozen=True)
class Site:
    """A folder that stands for site-packages, and sessions that see it."""

    folder: Path

    def places(self, *packages: str) -> list[str]:
        """For `sys.path`: the kit, out-of-tree packages of the tests, the engine."""
        return [str(one) for one in (self.folder, *(PLUGINS / name for name in packages), ROOT)]

    def environment(self, *packages: str, **more: str) -> dict[str, str]:
        """Of a process that sees these places."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        return kept | {"PYTHONPATH": os.pathsep.join(self.places(*packages))} | more

    def run(
        self, platform: str, cwd: Path, *arguments: str, packages=(), **more: str
    ) -> subprocess.CompletedProcess[str]:
        """`pytest --vllm-platform`, as on an author's machine."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, "--vllm-platform", platform, *arguments],
            cwd=cwd,
            env=self.environment(*packages, **more),
            capture_output=True,
            text=True,
            timeout=600,
        )


def copy_sources(folder: Path) -> Path:
    """A copy of what the package is built from; its root."""
    for name in SOURCES:
        for path in (ROOT / name).rglob("*"):
            if path.suffix in (".py", ".toml", ".md") and "build" not in path.parts:
                copy = folder / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="session")
def kit_site(tmp_path_factory) -> Site:
    """Installed by hand, as pip would: building with pip takes seconds."""
    folder = tmp_path_factory.mktemp("kit")
    source = copy_sources(folder / "source") / "kit"
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(folder / "site")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    metadata = folder / "site" / "vllm_platform_kit-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    shutil.rmtree(folder / "source")
    return Site(folder / "site")


@pytest.fixture(scope="session")
def kit(kit_site, request):
    """The package, importable in this process as well."""
    sys.path.insert(0, str(kit_site.folder))
    request.addfinalizer(lambda: sys.path.remove(str(kit_site.folder)))
    import vllm_platform_kit

    return vllm_platform_kit

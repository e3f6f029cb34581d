# SPDX-License-Identifier: Apache-2.0
"""The guard, built as pip builds it: its own package with the geometry inside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder with the package as pip builds it, its geometry inside."""
    folder = tmp_path_factory.mktemp("guard")
    source = folder / "source" / "guard"
    for name in ("vllm/v1/kv_cache_geometry", "vllm/utils", "guard"):
        for path in (ROOT / name).rglob("*"):
            if path.suffix in (".py", ".toml", ".md") and "build" not in path.parts:
                copy = folder / "source" / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(folder / "site")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def guard_path(installed, monkeypatch) -> None:
    """`import vllm_kv_guard` finds it."""
    monkeypatch.syspath_prepend(str(installed))

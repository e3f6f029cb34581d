# SPDX-License-Identifier: Apache-2.0
"""The scheduler's process needs no torch for what is decided there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "vllm" / "v1" / "core").rglob("*.py")
)
ENTRIES = ("kv_cache_utils", "kv_cache_manager", "sched.output", "sched.scheduler")


def test_core_imports_no_torch():
    """Guards against a torch import at run time anywhere under v1/core, or in what it imports."""
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert len(MODULES) > 10
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", [f"vllm.v1.core.{name}" for name in ENTRIES])
def test_core_module_imports_alone(module: str):
    """Guards against import cycles that only show when a module is the first to be imported."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=False)
    assert done.returncode == 0

# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-layout` as a command: platforms that are not here, exit statuses, the drawings in docs/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.platforms import current_platform, use_platform
from vllm.platforms.planned import PLANNED_PLATFORMS, planned_platform

DOCS = Path(__file__).parents[2] / "docs"
MODEL = str(DOCS / "kv-layouts" / "model")
MIXED = [
    "--platform", "rocm", "--attention-config",
    '{"backend_per_kind": {"sliding_window": "TRITON_ATTN"}}',
]  # fmt: skip
FUSED = [
    "--platform", "rocm", "--attention-config",
    '{"backend_per_kind": {"sliding_window": "TORCH_ATTN"}}',
]  # fmt: skip
# The drawings, their flags, and the exit status.
DRAWINGS = {
    "aligned.svg": (MIXED, 0),
    "unaligned.svg": ([*MIXED, "--unaligned"], 1),
    "page-by-page.svg": (FUSED, 0),
}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kv-layout", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent, timeout=120)


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_what_the_command_makes(name):
    """Guards against drawings in docs/ that the code has left behind. To make them anew: the command
    with these flags, into that file."""
    flags, status = DRAWINGS[name]
    done = run(MODEL, "--format", "svg", *flags)
    assert done.returncode == status, done.stderr
    assert done.stdout == (DOCS / "kv-layouts" / name).read_text()


def test_every_drawing_is_made_and_shown():
    drawn = {path.name for path in (DOCS / "kv-layouts").glob("*.svg")}
    text = (DOCS / "kv-layouts.md").read_text()
    assert drawn == set(DRAWINGS) and all(f"(kv-layouts/{name})" in text for name in drawn)


@pytest.mark.parametrize(
    ("platform", "backends"),
    [
        ("cpu", {"CPU_ATTN"}),
        ("cuda", {"TRITON_ATTN"}),
        ("rocm", {"ROCM_ATTN"}),
        ("xpu", {"TRITON_ATTN"}),
    ],
)
def test_platforms_that_are_not_here(platform, backends):
    """Each takes the backends that it would take with its device, whatever is installed here."""
    done = run(MODEL, "--platform", platform, "--format", "json")
    assert done.returncode == 0, done.stderr
    (allocation,) = json.loads(done.stdout)["allocations"]
    assert {layer["backend"] for layer in allocation["layers"]} == backends


def test_explained():
    done = run(MODEL, *MIXED, "--explain", "layers.0", "layers.1")
    assert done.returncode == 0, done.stderr
    assert "They share allocation 0." in done.stdout and "is aligned" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--explain", "layers.0", "layers.7"], "no layer has 'layers.7'"),
        (["--explain", "layers.0", "layers.1", "--format", "svg"], "--explain has text alone"),
        (["--attention-backend", "ROCM_ATTN"], "it does not run on cpu"),
        (["--format", "svg", "--num-gpu-blocks-override", "99"], "99 pages cannot be drawn"),
    ],
)
def test_a_wrong_argument_is_one_line(flags, said):
    done = run(MODEL, "--platform", "cpu", *flags)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]


def test_a_planned_platform_comes_before_the_machines_own():
    """Modules that hold one platform must never meet another."""
    import vllm.v1.worker.utils

    assert vllm.v1.worker.utils.current_platform is current_platform
    with pytest.raises(RuntimeError, match="vllm.v1.worker.utils"):
        use_platform(planned_platform("rocm"))
    with pytest.raises(ValueError, match=", ".join(PLANNED_PLATFORMS)):
        planned_platform("tpu")

# SPDX-License-Identifier: Apache-2.0
"""The CPU pipeline runs every test that `.ci/run` runs, each once."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BUILDKITE = ROOT / ".buildkite"
STEP_KEYS = {"label", "key", "command", "agents", "timeout_in_minutes"}


def steps(path: Path) -> list[dict]:
    return yaml.safe_load(path.read_text())["steps"]


def paths_of(step: dict) -> list[str]:
    """The paths that a step hands to .ci/run."""
    command, *paths = shlex.split(step["command"])
    assert command == ".ci/run" and paths, step["command"]
    return paths


@pytest.mark.parametrize("path", sorted(BUILDKITE.glob("*.yml")), ids=lambda path: path.name)
def test_steps_are_whole(path):
    """Guards against a misspelt key, which Buildkite would refuse or ignore, and a step without
    a bound."""
    keys = [step["key"] for step in steps(path)]
    assert len(set(keys)) == len(keys)
    for step in steps(path):
        assert set(step) == STEP_KEYS, step
        assert isinstance(step["timeout_in_minutes"], int) and step["agents"]["queue"]


def test_pipeline_uploads_files_that_are_there():
    uploaded = {step["command"].split()[-1] for step in steps(BUILDKITE / "pipeline.yml")}
    others = {f".buildkite/{path.name}" for path in BUILDKITE.glob("*.yml")}
    assert uploaded == others - {".buildkite/pipeline.yml"}


def test_every_test_file_is_in_one_step():
    """Guards against tests in a new folder that no step runs, and folders that two steps run."""
    named = [path for step in steps(BUILDKITE / "cpu.yml") for path in paths_of(step)]
    found = {path: list(ROOT.glob(path)) for path in named}  # the shell does the same
    places = [place for path in named for place in found[path]]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    empty = [
        p for p in named if not any(f.is_relative_to(place) for place in found[p] for f in files)
    ]
    assert empty == []
    times = {
        str(file.relative_to(ROOT)): sum(file.is_relative_to(place) for place in places)
        for file in files
    }
    assert {file: count for file, count in times.items() if count != 1} == {}


@pytest.mark.parametrize("name", ["nvidia", "amd", "intel"])
def test_steps_of_devices(name):
    """Guards against steps that would run the interpreter on a device, or no test."""
    path = BUILDKITE / f"{name}.yml"
    assert yaml.safe_load(path.read_text())["env"]["TRITON_INTERPRET"] == "0"
    paths = [ROOT / place for step in steps(path) for place in paths_of(step)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert all(f"{place.relative_to(ROOT)}" in done.stdout for place in paths)


def test_ci_runs_make_test():
    """The pipeline's steps and `.ci/run` differ in paths alone."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == 'exec make --no-print-directory test TESTS="${*:-tests}"'

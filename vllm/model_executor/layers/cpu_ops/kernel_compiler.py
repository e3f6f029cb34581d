# SPDX-License-Identifier: Apache-2.0
"""From a module of kernels to machine code. Numba code: run in a process of its own,

    python -m vllm.model_executor.layers.cpu_ops.kernel_compiler COMPILATION...

where numba need not optimise and takes no memory of the engine's. Each argument is a `Compilation` as
JSON; its file is there when all of it is.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
from numba import njit, types

from .kernel_library import ENTRY_PREFIX, replace_file
from .simd import Simd
from .target import Target, target_machine


def compile_kernels(module: str, dtype: str, target: Target) -> bytes:
    """An object file with every kernel of `module` behind a C entry point."""
    linked = None
    for name, function in importlib.import_module(module).build(Simd(target, dtype)).items():
        part = _lower(name, function)
        if linked is None:
            linked = part
        else:
            linked.link_in(part)
    linked.verify()
    machine = target_machine(target)
    _optimise(linked, machine)
    return machine.emit_object(linked)


def _lower(name: str, function: Callable) -> llvm.ModuleRef:
    jit = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", nogil=True)
    dispatcher = jit(function)
    dispatcher.compile(types.void(types.int64))
    (compiled,) = dispatcher.overloads.values()
    text = compiled.library.get_llvm_str() + _entry_point(name, compiled.fndesc.llvm_func_name)
    return llvm.parse_assembly(text)


def _entry_point(name: str, numba_name: str) -> str:
    """A C function around numba's own convention (return slot, exception slot, arguments)."""
    return f"""
define void @{ENTRY_PREFIX}{name}(i64 %args) {{
  %slot = alloca ptr
  %status = call i32 @{numba_name}(ptr %slot, ptr %slot, i64 %args)
  ret void
}}
"""


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """LLVM's passes of level 3 over all kernels at once, what they share inlined. Loops are not turned
    into vectors: kernels are written in them."""
    for function in module.functions:
        if not function.is_declaration and not function.name.startswith(ENTRY_PREFIX):
            function.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def main(arguments: list[str]) -> None:
    for argument in arguments:
        job = json.loads(argument)
        path, target = Path(job["path"]), Target(**job["target"])
        code = compile_kernels(job["module"], job["dtype"], target)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, code)


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels are compiled for: vector width and the bfloat16 dot product."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llvmlite.binding import TargetMachine

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Target:
    """`lanes`: float32 values in a vector (8 or 16). `bf16_dot`: AVX512_BF16's pairwise dot
    product is used. `family`: x86 or arm (64 bits), empty for any other.
    """

    lanes: int
    bf16_dot: bool
    cpu: str
    features: str
    family: str = ""

    def key(self) -> str:
        return f"{self.lanes}/{self.bf16_dot}/{self.cpu}/{self.features}/{self.family}"


@functools.cache
def host_target() -> Target:
    """The machine we run on, as LLVM sees it."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    wide = all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl"))
    return Target(
        lanes=16 if wide else 8,
        bf16_dot=wide and features.get("avx512bf16", False),
        cpu=llvm.get_host_cpu_name(),
        features=features.flatten(),
        family=_family(llvm.get_default_triple()),
    )


def target_machine(target: Target) -> TargetMachine:
    """LLVM's code generator for it."""
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


def _family(triple: str) -> str:
    machine = triple.partition("-")[0]
    if machine == "x86_64":
        return "x86"
    return "arm" if machine in ("aarch64", "arm64") else ""

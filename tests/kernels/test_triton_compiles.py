# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for NVIDIA and AMD GPUs, without one. The interpreter takes much that Triton's
compiler refuses: types that change in a loop, shapes that are no powers of two."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from vllm.triton_utils import HAS_TRITON, triton
from vllm.utils.import_utils import module_exists

if not HAS_TRITON:
    pytest.skip("triton is not installed: pip install vllm[triton]", allow_module_level=True)

TARGETS = {"cuda-80": ("cuda", 80, 32), "cuda-90": ("cuda", 90, 32), "hip-gfx942": ("hip", "gfx942", 64)}
# LDS of an AMD compute unit; CUDA gives a program 48 KiB without asking and more if asked.
MOST_SHARED_BYTES = 64 * 1024


@dataclass(frozen=True)
class Variant:
    """Elements as Triton spells them; sizes as the launcher picks them."""

    dtype: str
    cache_dtype: str
    head_size: int
    padded: int
    rows: int
    keys: int
    block_size: int = 16
    quant: int = 0
    everything: bool = False


VARIANTS = [
    Variant("bf16", "bf16", 128, 128, 64, 32),
    Variant("fp16", "fp16", 80, 128, 64, 32, block_size=528, everything=True),
    Variant("fp32", "fp32", 64, 64, 64, 32),
    Variant("bf16", "bf16", 256, 256, 32, 16),
    Variant("bf16", "i8", 128, 128, 64, 32, quant=2),
    Variant("bf16", "fp8e4nv", 128, 128, 64, 32, quant=1),
]
_THREE, _FOUR = ("i32",) * 3, ("i64", "i32", "i32", "i32")


def signature(v: Variant) -> dict[str, object]:
    types: dict[str, object] = dict.fromkeys(("out", "query", "key", "value"), f"*{v.dtype}")
    types |= dict.fromkeys(("key_cache", "value_cache"), f"*{v.cache_dtype}")
    types |= dict.fromkeys(("query_start_loc", "seq_lens", "block_table", "tiles"), "*i32")
    types |= dict.fromkeys(("partial_acc", "partial_state", "key_scales", "value_scales"), "*fp32")
    types |= dict.fromkeys(("alibi_slopes", "sinks"), "*fp32")
    types |= dict.fromkeys(("scale", "soft_cap", "k_scale", "v_scale"), "fp32")
    types |= dict.fromkeys(("table_stride", "num_rows"), "i32")
    types |= dict.fromkeys(("out_strides", "query_strides", "scale_strides"), _THREE)
    types |= dict.fromkeys(("key_cache_strides", "value_cache_strides"), _FOUR)
    return types | {"slot_mapping": "*i64", "partial_strides": ("i32",)}


def constants(v: Variant) -> dict[str, object]:
    window = 100 if v.everything else 0
    fixed: dict[str, object] = dict(
        D=v.head_size, D_PAD=v.padded, TILE=v.keys, BLOCK_SIZE=v.block_size, QUANT=v.quant,
        WINDOW=window, GROUP=4, GROUP_PAD=4, CAUSAL=True, LEAST=256, MOST_SPLITS=16,
    )  # fmt: skip
    if v.quant != 2:
        fixed |= {"key_scales": None, "value_scales": None}
    if not v.everything:
        fixed |= {"alibi_slopes": None, "sinks": None, "soft_cap": None}
    return fixed


def compile_kernel(kernel, target, types, fixed) -> None:
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = {name: value for name, value in fixed.items() if name in names}
    types = {name: "constexpr" if name in fixed else types[name] for name in names}
    by_place = {(names.index(name),): value for name, value in fixed.items()}
    compiled = triton.compile(ASTSource(kernel, types, by_place), target=target)
    assert compiled.metadata.shared <= MOST_SHARED_BYTES, (kernel.fn.__name__, types)


def compile_all(target_name: str) -> None:
    from triton.backends.compiler import GPUTarget

    from vllm.v1.attention.ops.triton import attention_kernels, cache_kernels

    target = GPUTarget(*TARGETS[target_name])
    for v in VARIANTS:
        if v.cache_dtype == "fp8e4nv" and target_name == "cuda-80":
            continue  # the hardware lacks it, and the backends refuse it
        of_cache = {"key_strides": _THREE, "value_strides": _THREE}
        of_attention = {"key_strides": _FOUR, "value_strides": _FOUR}
        types, fixed = signature(v), constants(v)
        kernel = cache_kernels.reshape_and_cache_kernel
        largest = dict(LARGEST=127.0 if v.cache_dtype == "i8" else 448.0, IS_INT=v.cache_dtype == "i8")
        sizes = dict(NUM_HEADS=8, ROWS=4096 // v.padded)
        compile_kernel(kernel, target, types | of_cache, fixed | sizes | largest)
        types |= of_attention
        compile_kernel(attention_kernels.prefill_kernel, target, types, fixed | {"ROWS": v.rows})
        for splits in (1, 8):
            decode = fixed | {"ROWS": 16, "SPLITS": splits}
            compile_kernel(attention_kernels.decode_kernel, target, types, decode)
        compile_kernel(attention_kernels.merge_kernel, target, types, fixed | {"SPLITS": 8})


@pytest.mark.slow
@pytest.mark.parametrize("target_name", TARGETS)
def test_kernels_compile(target_name, tmp_path):
    """In a process of its own: here they are interpreted."""
    backend = {"cuda": "nvidia", "hip": "amd"}[TARGETS[target_name][0]]
    if not module_exists(f"triton.backends.{backend}"):
        pytest.skip(f"this triton does not compile for {backend}")
    code = f"from tests.kernels.test_triton_compiles import compile_all; compile_all({target_name!r})"
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = str(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

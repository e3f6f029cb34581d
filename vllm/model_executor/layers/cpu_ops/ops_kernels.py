# SPDX-License-Identifier: Apache-2.0
"""The small kernels of a dtype, by name. Numba code: imported only when there is no compiled
object in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from .argmax_kernels import make_argmax
from .elementwise_kernels import make_add_table_rows, make_copy_rows, make_scale
from .gate_kernels import make_activate, make_gate, make_gelu, make_gelu_tanh, make_silu
from .gemv_kernels import make_gemv
from .norm_kernels import make_layer_norm, make_rms_norm, make_weigh, make_weigh_gemma
from .packed_kernels import make_embedding, make_packed_gemm
from .rotary_kernels import make_rotary
from .simd import Simd


def build(simd: Simd) -> dict[str, Callable]:
    kernels = {
        "rms_norm": make_rms_norm(simd, make_weigh(simd)),
        "gemma_rms_norm": make_rms_norm(simd, make_weigh_gemma(simd)),
        "layer_norm": make_layer_norm(simd),
        "silu_and_mul": make_gate(simd, make_silu(simd)),
        "gelu_and_mul": make_gate(simd, make_gelu(simd)),
        "gelu_tanh_and_mul": make_gate(simd, make_gelu_tanh(simd)),
        "gelu": make_activate(simd, make_gelu(simd)),
        "gelu_tanh": make_activate(simd, make_gelu_tanh(simd)),
        "add_table_rows": make_add_table_rows(simd),
        "rotary": make_rotary(simd),
        "copy_rows": make_copy_rows(simd),
        "scale": make_scale(simd),
        "gemv": make_gemv(simd),
        "embedding": make_embedding(simd),
        "argmax": make_argmax(simd),
    }
    if simd.pairs:
        kernels["packed_gemm"] = make_packed_gemm(simd)
    return kernels

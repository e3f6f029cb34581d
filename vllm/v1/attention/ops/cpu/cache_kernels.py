# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values into their slots. Numba code."""

from __future__ import annotations

from numba import njit

from vllm.model_executor.layers.cpu_ops.simd import Simd

from . import cache_args as C

_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def make_cache(simd: Simd):
    """cache(args): copies keys and values to their slots, a range of tokens at a time; negative
    slots are skipped.
    """
    iload64, atomic_add, copy, div = simd.iload64, simd.atomic_add, simd.copy, simd.div

    @_jit
    def write_token(p, token, slot):
        size = iload64(p + C.TOKENS_PER_BLOCK)
        block = div(slot, size)
        offset = slot - block * size
        key, value = iload64(p + C.KEY) + token * iload64(p + C.KEY_TOKEN), iload64(p + C.VALUE)
        value += token * iload64(p + C.VALUE_TOKEN)
        k = iload64(p + C.K) + block * iload64(p + C.K_BLOCK) + offset * iload64(p + C.K_TOKEN)
        v = iload64(p + C.V) + block * iload64(p + C.V_BLOCK) + offset * iload64(p + C.V_TOKEN)
        for h in range(iload64(p + C.NUM_KV_HEADS)):
            copy(
                k + h * iload64(p + C.K_HEAD),
                key + h * iload64(p + C.KEY_HEAD),
                iload64(p + C.K_BYTES),
            )
            copy(
                v + h * iload64(p + C.V_HEAD),
                value + h * iload64(p + C.VALUE_HEAD),
                iload64(p + C.V_BYTES),
            )

    def cache(p):
        tokens, step, slots = iload64(p + C.NUM_TOKENS), iload64(p + C.STEP), iload64(p + C.SLOTS)
        first = atomic_add(p + C.NEXT, step)
        while first < tokens:
            for token in range(first, min(first + step, tokens)):
                slot = iload64(slots + 8 * token)
                if slot >= 0:
                    write_token(p, token, slot)
            first = atomic_add(p + C.NEXT, step)

    return cache

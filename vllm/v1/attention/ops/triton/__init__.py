# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton: one set of kernels for CUDA, ROCm and XPU, and for the CPU under
Triton's interpreter (TRITON_INTERPRET=1).

    reshape_and_cache(key, value, cache, slot_mapping)
    paged_attention(query, cache, out, batch, scale, ...)
    PagedKVCache(key, value, key_scale, value_scale)

key, value: (T, H, D); cache: K and V as views (NB, BS, H, D) of any strides, so that no kernel
knows a layout; slot_mapping: (T,) int64, block * BS + place, negative: not written; query, out: (T,
Hq, D); batch: `PagedBatch`. Model dtypes are float32, float16 and bfloat16; sums are float32.

* Causal: token i of a request's n is at position seq_len - n + i. sliding_window w (0: none): it
  sees positions (p - w, p]. Not causal: each token sees all keys of its request.
* Slots at or beyond seq_len, and before the window, change no bit of the output, whatever they hold.
* Neighbours in the batch change no bit of a request.
* A row that sees no key gives zeros. Rows of `out` beyond the batch's tokens are left alone.
* alibi_slopes, sinks: float32 (Hq,). A sink is a logit that takes part in the softmax's sum and has
  no value.
"""

from .launchers import PagedKVCache, TileSizes, paged_attention, reshape_and_cache

__all__ = ["PagedKVCache", "TileSizes", "paged_attention", "reshape_and_cache"]

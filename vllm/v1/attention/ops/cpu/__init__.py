# SPDX-License-Identifier: Apache-2.0
"""Paged attention on CPUs: compiled Python kernels that read float32, bfloat16 and float16 pages
in place.

    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    paged_attention(query, key_cache, value_cache, out, query_start_loc, seq_lens, block_table,
                    scale, causal=True, sliding_window=0, logits_soft_cap=0.0,
                    alibi_slopes=None, sinks=None)
    sequence_attention(query, key, value, cu_seqlens, max_seqlen, scale)
                                 an encoder's, over tokens at hand: (T, H, D)
    key_value_views(kv_cache)    (NB, H, BS, 2 * D) -> two views (NB, BS, H, D)
    warmup(dtype)                compiles all kernels of a dtype, or loads them from disk

key, value: (T, H, D); key_cache, value_cache: views (NB, BS, H, D) of any strides with the last
1; slot_mapping: int64 (T,), negative: skipped; query, out: (T, Hq, D); query_start_loc: int32 (R
+ 1,); seq_lens: int32 (R,): keys of a request, those of this step included (cross attention: the
encoder's length, with causal=False); block_table: int32 (R, columns). All tensors on the CPU and
of one dtype; sums are float32.

* Causal: token i of a request's n sits at position seq_len - n + i. sliding_window w (0: none):
  it sees positions (p - w, p]. Blocks wholly outside every row's window are never looked up.
* Slots at or beyond seq_len, and before the window, change no bit of the output, whatever they
  hold.
* A row's bits depend on its own keys only: not on its neighbours, on how a prompt was cut into
  chunks, or on threads.
* A row that sees no key gives zeros. Rows of `out` outside query_start_loc's range are left
  alone.
* alibi_slopes, sinks: float32 (Hq,). A sink is a logit that takes part in the softmax's sum and
  has no value.
* One thread at a time may call these (they share scratch memory); they use the threads of
  `init_threads`.
"""

from __future__ import annotations

import torch

from .launchers import LIBRARY, key_value_views, paged_attention, reshape_and_cache
from .sequences import sequence_attention, supports_sequences


def warmup(dtype: torch.dtype) -> None:
    """Makes the kernels of a dtype ready: compiles them on the first start, else maps them from
    the cache on disk.
    """
    LIBRARY.load(str(dtype).removeprefix("torch."))


__all__ = [
    "LIBRARY",
    "key_value_views",
    "paged_attention",
    "reshape_and_cache",
    "sequence_attention",
    "supports_sequences",
    "warmup",
]

# SPDX-License-Identifier: Apache-2.0
"""Upstream 0.26 to 0.28: a fused cache of two heads (TRITON_ATTN), taken for K and V, beside ROCM_ATTN."""

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.utils import AttentionGroup

spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
raw = torch.zeros(3 * spec.page_size_bytes, dtype=torch.int8)  # Three pages, shared by two groups.
groups = [KVCacheGroupSpec([name], spec) for name in ("layers.0", "layers.1")]
config = KVCacheConfig(3, [KVCacheTensor(raw.numel(), ["layers.0", "layers.1"])], groups)
backends = [Backends[name].get_class() for name in ("ROCM_ATTN", "TRITON_ATTN")]
layers = [AttentionGroup(b, [f"layers.{i}"], spec, i) for i, b in enumerate(backends)]
raws = {"layers.0": raw, "layers.1": raw}
caches = _reshape_kv_cache(layers, raws, "auto", [16, 16], {}, config)

caches["layers.0"][:, 0] = 1.0  # Page 0 of one layer is written ...
changed = int(caches["layers.1"][1].count_nonzero())  # ... and page 1 of the other is looked at.
print(f"{changed} of {caches['layers.1'][1].numel()} numbers of another request's page have changed")

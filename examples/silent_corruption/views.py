# SPDX-License-Identifier: Apache-2.0
"""Two layers over one allocation: `views.py BACKEND BACKEND HEADS`, with upstream 0.25 to 0.28."""

import sys

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_interface import KVCacheTensor as Pool
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.utils import AttentionGroup

names, heads = ["layers.0", "layers.1"], int(sys.argv[3])
spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16)
raw = torch.zeros(3 * spec.page_size_bytes, dtype=torch.int8)  # Three pages, shared by two groups.
groups = [KVCacheGroupSpec([name], spec) for name in names]
config = KVCacheConfig(3, [Pool(raw.numel(), names)], groups)
backends = [Backends[name].get_class() for name in sys.argv[1:3]]
layers = [AttentionGroup(b, [n], spec, i) for i, (n, b) in enumerate(zip(names, backends))]
caches = _reshape_kv_cache(layers, dict.fromkeys(names, raw), "auto", [16, 16], {}, config)
page_dims = [b.get_kv_cache_shape(9, 16, heads, 128).index(9) for b in backends]

if __name__ == "__main__":
    caches[names[0]].select(page_dims[0], 2).fill_(1.0)  # One layer's page 2, the other's page 1.
    page = caches[names[1]].select(page_dims[1], 1)
    print(f"{int(page.count_nonzero())} of {page.numel()} numbers of another page have changed")

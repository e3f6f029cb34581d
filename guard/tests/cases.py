# SPDX-License-Identifier: Apache-2.0
"""What the guard says of caches that an installed vLLM's own code lays out, on CPU tensors.

    python cases.py     prints one line of JSON: case -> "right", "refused" or what collides

A case is two layers of two groups over one allocation, each with its backend's layout, made by
`_reshape_kv_cache` of the runner; "right" means that the guard found nothing.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.utils import AttentionGroup

from vllm_kv_guard.findings import examine

NUM_BLOCKS, TOKENS, HEAD_SIZE = 4, 16, 4


class Backend:
    """What the runner and the guard ask a backend for."""

    order = None

    @classmethod
    def get_name(cls):
        return cls.__name__

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension=False):
        if cls.order is None:
            raise NotImplementedError
        return cls.order

    @classmethod
    def get_kv_cache_block_dim(cls, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return cls.get_kv_cache_shape(NUM_BLOCKS + 1009, 3, 5, 7).index(NUM_BLOCKS + 1009)


class KVFirst(Backend):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst(Backend):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class BlocksFirstHND(BlocksFirst):
    order = (0, 1, 3, 2, 4)


class Fused(Backend):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


CASES = {
    "blocks-first beside blocks-first": (BlocksFirst, BlocksFirst, 2, True),
    "blocks-first beside K/V-first": (KVFirst, BlocksFirst, 2, True),
    "blocks-first beside K/V-first, unaligned": (KVFirst, BlocksFirst, 2, False),
    "HND blocks-first beside K/V-first": (KVFirst, BlocksFirstHND, 2, True),
    "fused of 1 head beside K/V-first": (KVFirst, Fused, 1, True),
    "fused of 2 heads beside K/V-first": (KVFirst, Fused, 2, True),
}


def run(one, other, heads, aligned):
    """The guard's word for the pair."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
    )
    names = ["layers.0.attn", "layers.1.attn"]
    backends = dict(zip(names, (one, other)))
    groups = [AttentionGroup(b, [n], spec, i) for i, (n, b) in enumerate(backends.items())]
    raw = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size=raw.numel(), shared_by=names)],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name in names],
    )
    raws, sizes = dict.fromkeys(names, raw), [TOKENS, TOKENS]
    extra = {"kv_cache_config": config} if aligned else {}
    try:
        caches = _reshape_kv_cache(groups, raws, "auto", sizes, {}, **extra)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}: {error}".splitlines()[0]
    layers = {
        name: SimpleNamespace(kv_cache=caches[name], attn_backend=backends[name]) for name in names
    }
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    report = examine(worker, config)
    return "right" if report.is_sound else report.line()


def main():
    print("CASES " + json.dumps({name: run(*case) for name, case in CASES.items()}))


if __name__ == "__main__":
    sys.exit(main())

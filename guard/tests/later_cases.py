# SPDX-License-Identifier: Apache-2.0
"""As `cases.py`, for vLLM 0.29 and later: caches that `allocate_kv_cache` of the installed release lays
out in each of its six orders, and what the guard and its geometry say of them.

    python later_cases.py     prints one line of JSON: case -> "right", "refused" or what is wrong

A case is two groups of two layers over one allocation. Besides the guard's word, "right" means that the
tensors are where a descriptor of that order says, and that K and V of a K/V-first cache of up to 0.28,
copied into them view by view, are read back there and nowhere else.
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
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_kv_guard.findings import examine
from vllm_kv_guard.kv_cache_geometry import (
    KVCacheGeometry,
    PermutedCache,
    fused_fields,
    split_fields,
)

NUM_BLOCKS, TOKENS, HEADS, HEAD_SIZE = 4, 16, 2, 4
GROUPS = ["full.0", "full.1"], ["window.0", "window.1"]
ROLES = ("block", "head", "token", "content")


class Backend:
    """What the guard asks a backend for."""

    @staticmethod
    def get_name():
        return "ANY"

    @staticmethod
    def supported_kv_cache_layouts():
        return None


def described(order, heads=HEADS, head_size=HEAD_SIZE, tokens=TOKENS):
    """The layers of one group, as a descriptor of that order."""
    ratio = TOKENS // tokens
    shape = (2, NUM_BLOCKS * ratio, heads, tokens, 2 * head_size)
    return PermutedCache(
        order, shape, "float32", fused_fields(head_size, "float32"), 0, ratio
    )


def allocated(order, window_heads, tokens):
    """The release's own tensors, and the config that they were made by."""
    window_size = HEADS * HEAD_SIZE // window_heads
    sizes = {"block_size": TOKENS, "dtype": torch.float32}
    full = FullAttentionSpec(num_kv_heads=HEADS, head_size=HEAD_SIZE, **sizes)
    window = SlidingWindowSpec(
        num_kv_heads=window_heads, head_size=window_size, sliding_window=8, **sizes
    )
    tensors = []
    for names, pool in zip(GROUPS, (described(order), described(order, window_heads, window_size))):
        geometry = pool.geometry()
        strides = geometry.dim("layer").stride, geometry.pitch
        tensors.append(
            KVCacheTensor(size=geometry.end, layers=names, layer_stride=strides[0],
                          block_stride=strides[1], offset=0)
        )  # fmt: skip
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            KVCacheGroupSpec(names, spec) for names, spec in zip(GROUPS, (full, window))
        ],
        kv_cache_layout=order,
    )
    device, kernel_sizes = torch.device("cpu"), [tokens, tokens]
    layout = KVCacheLayout[order]
    return config, allocate_kv_cache(config, device, layout, kernel_block_sizes=kernel_sizes)


def copied_wrongly(caches, order, tokens):
    """Page 3 of a K/V-first cache goes into page 2 of the second layer; what is wrong then."""
    ours = KVCacheGeometry.plan(
        ("kv", "block", "token", "head", "content"),
        (2, NUM_BLOCKS * (TOKENS // tokens), tokens, HEADS, HEAD_SIZE),
        None, "float32", NUM_BLOCKS, kernel_blocks_per_page=TOKENS // tokens,
        fields=split_fields(HEAD_SIZE, "float32"),
    )  # fmt: skip
    theirs = described(order, tokens=tokens).geometry().layer(1)
    source = torch.randn(ours.end // 4).view(torch.int8)
    raw = torch.empty(0, dtype=torch.int8).set_(caches["full.1"].untyped_storage())
    ratio = TOKENS // tokens
    from_page, into_page = slice(3 * ratio, 4 * ratio), slice(2 * ratio, 3 * ratio)
    for mine, other in zip(ours.key_value(source), theirs.key_value(raw)):
        other[into_page].copy_(mine[from_page])
    key, value = (side[from_page].transpose(1, 2) for side in ours.key_value(source))
    seen = caches["full.1"][into_page]
    if not torch.equal(seen, torch.cat((key, value), -1)):
        return "what was copied is not what its tensor shows"
    seen.zero_()
    return "bytes of another page or layer were touched" if raw.any() else None


def run(order, window_heads, tokens):
    """The guard's word, or how the descriptor is wrong."""
    try:
        config, caches = allocated(order, window_heads, tokens)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}: {error}".splitlines()[0]
    layers = {n: SimpleNamespace(kv_cache=c, attn_backend=Backend) for n, c in caches.items()}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    report = examine(worker, config)
    if not report.is_sound:
        return report.line()
    ratio, fields = TOKENS // tokens, fused_fields(HEAD_SIZE, "float32")
    observed = [
        KVCacheGeometry.observe(caches[n], ROLES, kernel_blocks_per_page=ratio, fields=fields)
        for n in GROUPS[0]
    ]
    if PermutedCache.of(observed) != described(order, tokens=tokens):
        return f"is {PermutedCache.of(observed).describe()}"
    return copied_wrongly(caches, order, tokens) or "right"


def main():
    said = {}
    for order in KVCacheLayout.__members__:
        said[order] = run(order, HEADS, TOKENS)
        said[f"{order}, pages of 2 kernel blocks"] = run(order, HEADS, TOKENS // 2)
        said[f"{order}, 2 heads beside 1"] = run(order, 1, TOKENS)
    print("CASES " + json.dumps(said))


if __name__ == "__main__":
    sys.exit(main())

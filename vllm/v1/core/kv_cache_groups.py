# SPDX-License-Identifier: Apache-2.0
"""Which layers share a block table, and which allocations they lie in.

    layers   f0 s0 s1 s2 f1 s3 s4 s5        f: full attention, s: sliding window
    groups   [f0 f1] [s0 s2 s4] -> see below, [s1 s3 s5]
    tensors  one for each place in a group: tensor i is shared by layer i of every group

A page id belongs to one group of one request at a time, so layers of different groups can lie in
the same allocation. Groups of equal length leave no place of a page unused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

logger = init_logger(__name__)


def is_kv_cache_type_attention_free(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether no layer has a KV cache."""
    return not kv_cache_spec


def is_kv_cache_spec_uniform(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether one block table serves all layers: their specs can be merged."""
    specs = list(kv_cache_spec.values())
    if any(type(spec) is not type(specs[0]) for spec in specs):
        return False
    try:
        specs[0].merge(specs)
    except ValueError:
        return False
    return True


def create_kv_cache_group_specs(
    kv_cache_spec: dict[str, KVCacheSpec], grouped_layer_names: list[list[str]]
) -> list[KVCacheGroupSpec]:
    """A group for each list of layers; their specs merged."""
    groups = []
    for names in grouped_layer_names:
        specs = [kv_cache_spec[name] for name in names]
        groups.append(KVCacheGroupSpec(names, specs[0].merge(specs)))
    return groups


def get_uniform_page_size(kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """The page size, in bytes of a layer, that all have.

    Raises:
        ValueError: they differ.
    """
    sizes = {spec.page_size_bytes for spec in kv_cache_specs}
    if len(sizes) != 1:
        raise ValueError(f"page sizes differ: {sorted(sizes)} bytes")
    return sizes.pop()


def unify_kv_cache_spec_page_size(kv_cache_spec: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers with pages of equal bytes. Smaller pages get more tokens; what is then still
    missing (the sizes are no multiples of each other) is padding:

        bytes a token  520 and 1032, 16 tokens      one page of 16,640 bytes
        520            [ 32 tokens: 16,640          ]
        1032           [ 16 tokens: 16,512     | pad]

    Raises:
        NotImplementedError: a page can be given neither more tokens nor padding.
    """
    largest = max(spec.page_size_bytes for spec in kv_cache_spec.values())
    enlarged = {name: _enlarge(spec, largest) for name, spec in kv_cache_spec.items()}
    sizes = {spec.page_size_bytes for spec in enlarged.values()}
    if len(sizes) == 1:
        return enlarged
    # Kernel blocks share the padding evenly, so it must divide by any number of them.
    unit = 8 * math.lcm(*(spec.block_size for spec in enlarged.values()))
    page_size = round_up(max(sizes), unit)
    logger.info(
        "KV cache: pages of %s bytes are padded to %d, so that their layers can share memory",
        " and ".join(str(size) for size in sorted(sizes)), page_size,
    )  # fmt: skip
    return {name: _pad(name, spec, page_size) for name, spec in enlarged.items()}


def _enlarge(spec: KVCacheSpec, page_size: int) -> KVCacheSpec:
    """With as many times the tokens as bring its page nearest to `page_size`. States of a recurrent
    layer do not grow with tokens."""
    if not isinstance(spec, AttentionSpec):
        return spec
    return spec.copy_with_new_block_size(spec.block_size * round(page_size / spec.page_size_bytes))


def _pad(name: str, spec: KVCacheSpec, page_size: int) -> KVCacheSpec:
    if not isinstance(spec, AttentionSpec | MambaSpec):
        raise NotImplementedError(
            f"layer {name} cannot share a pool of pages of {page_size} bytes: a "
            f"{type(spec).__name__} of {spec.page_size_bytes} bytes cannot be padded"
        )
    return dataclasses.replace(spec, page_size_padded=page_size)


def unify_hybrid_kv_cache_specs(
    kv_cache_spec: dict[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """The same layers with windows kept as if they were full attention: one block table serves
    both, at the price of pages that slide out but are not given back."""
    return {name: _as_full_attention(spec) for name, spec in kv_cache_spec.items()}


def _as_full_attention(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec):
        return spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return FullAttentionSpec(**fields)


def get_kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups of a model's layers.

    Raises:
        NotImplementedError: pages of the layers cannot be made equally large.
    """
    if is_kv_cache_type_attention_free(kv_cache_spec):
        return []
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        kv_cache_spec = unify_hybrid_kv_cache_specs(kv_cache_spec)
    if is_kv_cache_spec_uniform(kv_cache_spec):
        return create_kv_cache_group_specs(kv_cache_spec, [list(kv_cache_spec)])
    kv_cache_spec = unify_kv_cache_spec_page_size(kv_cache_spec)
    return create_kv_cache_group_specs(kv_cache_spec, _split_evenly(kv_cache_spec))


def _split_evenly(kv_cache_spec: dict[str, KVCacheSpec]) -> list[list[str]]:
    """Layers with the same spec, split into groups of nearly one length. A layer and its neighbour
    of the same kind go to different groups, so that pipeline stages get a share of each."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        by_spec.setdefault(spec, []).append(name)
    counts = [len(names) for names in by_spec.values()]
    length = _best_group_length(counts)
    groups = []
    for names in by_spec.values():
        num_groups = cdiv(len(names), length)
        groups += [names[i::num_groups] for i in range(num_groups)]
    num_places = length * len(groups)
    if num_places > sum(counts):
        logger.info(
            "KV cache: %d groups of up to %d layers for %d layers; %d%% of each page is unused",
            len(groups), length, sum(counts), 100 - 100 * sum(counts) // num_places,
        )  # fmt: skip
    return groups


def _best_group_length(counts: list[int]) -> int:
    """The shortest or the longest kind's number of layers, whichever leaves fewer places unused;
    of equals the longer, since fewer groups mean fewer block tables."""

    def num_places(length: int) -> int:
        return length * sum(cdiv(count, length) for count in counts)

    return min((max(counts), min(counts)), key=num_places)


def bytes_per_block(kv_cache_groups: list[KVCacheGroupSpec]) -> int:
    """Bytes that one page id stands for, over all tensors."""
    page_size = get_uniform_page_size(group.kv_cache_spec for group in kv_cache_groups)
    return page_size * max(len(group.layer_names) for group in kv_cache_groups)


def make_kv_cache_tensors(
    kv_cache_groups: list[KVCacheGroupSpec], num_blocks: int
) -> list[KVCacheTensor]:
    """The allocations for `num_blocks` pages: tensor i holds layer i of every group."""
    size = num_blocks * get_uniform_page_size(group.kv_cache_spec for group in kv_cache_groups)
    length = max(len(group.layer_names) for group in kv_cache_groups)
    return [
        KVCacheTensor(
            size,
            [g.layer_names[i] for g in kv_cache_groups if i < len(g.layer_names)],
        )
        for i in range(length)
    ]

# SPDX-License-Identifier: Apache-2.0
"""How many pages fit into the memory there is, and what they hold. Every estimate goes through the
groups that are then allocated, so that what is promised is what is there."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_groups import (
    bytes_per_block,
    get_kv_cache_groups,
    make_kv_cache_tensors,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = init_logger(__name__)

_NUM_NULL_BLOCKS = 1  # Page 0 is a placeholder and is never handed out.


def max_memory_usage_bytes(vllm_config: VllmConfig, kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """Bytes that a request of `max_model_len` takes in these layers at most, each on its own."""
    return sum(spec.max_memory_usage_bytes(vllm_config) for spec in kv_cache_specs)


def max_blocks_per_request(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec]
) -> int:
    """Pages that a request of `max_model_len` holds at once, over all groups, at most."""
    specs = [group.kv_cache_spec for group in kv_cache_groups]
    return sum(cdiv(s.max_memory_usage_bytes(vllm_config), s.page_size_bytes) for s in specs)


def may_override_num_blocks(vllm_config: VllmConfig, num_blocks: int) -> int:
    """`num_blocks`, or what the user wants instead."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return num_blocks
    logger.info("KV cache: %d pages instead of %d (num_gpu_blocks_override)", override, num_blocks)
    return override


def get_num_blocks(
    vllm_config: VllmConfig, num_layers: int, available_memory: int, page_size: int
) -> int:
    """Pages of `num_layers` times `page_size` bytes that fit into `available_memory` bytes, or as
    many as the user wants."""
    return may_override_num_blocks(vllm_config, max(0, available_memory // page_size // num_layers))


def check_enough_kv_cache_memory(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> None:
    """Checks that one request of `max_model_len` fits into `available_memory` bytes with nobody
    beside it. Not with `num_gpu_blocks_override`: then requests that are too long end with an error
    of their own.

    Raises:
        ValueError: it does not; says what is needed, what would fit, and what to change.
    """
    groups = get_kv_cache_groups(vllm_config, kv_cache_spec)
    _check_groups_fit(vllm_config, groups, available_memory)


def _check_groups_fit(
    vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], available_memory: int
) -> None:
    if not groups or vllm_config.cache_config.num_gpu_blocks_override is not None:
        return
    num_blocks = max_blocks_per_request(vllm_config, groups) + _NUM_NULL_BLOCKS
    needed = num_blocks * bytes_per_block(groups)
    if needed <= available_memory:
        return
    max_model_len = vllm_config.model_config.max_model_len
    fitting = _longest_that_fits(vllm_config, groups, available_memory)
    advice = f"lower --max-model-len to {fitting} or less, or " if fitting > 0 else ""
    raise ValueError(
        f"a request of max_model_len ({max_model_len} tokens) needs {_mib(needed)} of KV cache, "
        f"but there are {_mib(max(available_memory, 0))}, enough for {fitting} tokens: {advice}"
        "give the KV cache more memory (--gpu-memory-utilization, --kv-cache-memory-bytes; on a "
        "CPU VLLM_CPU_KVCACHE_SPACE)"
    )


def estimate_max_model_len(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> int:
    """The longest `max_model_len`, at most the one set, of which one request fits into
    `available_memory` bytes; 0 if not even one token does."""
    groups = get_kv_cache_groups(vllm_config, kv_cache_spec)
    return _longest_that_fits(vllm_config, groups, available_memory)


def _longest_that_fits(
    vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], available_memory: int
) -> int:
    max_model_len = vllm_config.model_config.max_model_len
    if not groups:
        return max_model_len
    num_usable = available_memory // bytes_per_block(groups) - _NUM_NULL_BLOCKS

    def fits(length: int) -> bool:
        trial = copy.copy(vllm_config)
        trial.model_config = copy.copy(vllm_config.model_config)
        trial.model_config.max_model_len = length
        return max_blocks_per_request(trial, groups) <= num_usable

    low, high = 0, max_model_len
    while low < high:
        middle = cdiv(low + high, 2)
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def get_kv_cache_config_from_groups(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """As many pages as fit into `available_memory` bytes, and the allocations for them."""
    if not kv_cache_groups:
        # Nothing is kept: the placeholder, and a page that nobody asks for.
        return KVCacheConfig(_NUM_NULL_BLOCKS + 1, [], [])
    num_blocks = get_num_blocks(
        vllm_config, 1, available_memory, bytes_per_block(kv_cache_groups)
    )
    tensors = make_kv_cache_tensors(kv_cache_groups, num_blocks)
    return KVCacheConfig(num_blocks, tensors, kv_cache_groups)


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """The cache of each worker: the same groups everywhere (those of the whole model), each with
    the worker's own layers, and the same number of pages.

    Args:
        kv_cache_specs: the layers of each worker; all have some, or none has.
        available_memory: bytes of each worker.

    Raises:
        ValueError: a request of `max_model_len` does not fit, or two workers disagree on a layer.
    """
    groups = get_kv_cache_groups(vllm_config, _merge_worker_specs(kv_cache_specs))
    own_groups = [_project(groups, specs) for specs in kv_cache_specs]
    workers = list(zip(own_groups, available_memory, strict=True))
    for own, memory in workers:
        _check_groups_fit(vllm_config, own, memory)
    configs = [get_kv_cache_config_from_groups(vllm_config, own, memory) for own, memory in workers]
    num_blocks = min(config.num_blocks for config in configs)
    for config in configs:
        if config.kv_cache_groups and config.num_blocks > num_blocks:
            config.num_blocks = num_blocks
            config.kv_cache_tensors = make_kv_cache_tensors(config.kv_cache_groups, num_blocks)
    return configs


def _merge_worker_specs(kv_cache_specs: list[dict[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for specs in kv_cache_specs:
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise ValueError(
                    f"workers disagree on the KV cache of layer {name}: {merged[name]} and {spec}"
                )
    return merged


def _project(
    groups: list[KVCacheGroupSpec], own_layers: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups with only the worker's own layers. A group keeps its number even when none of its
    layers are here: block tables are sent for all."""
    return [
        dataclasses.replace(g, layer_names=[n for n in g.layer_names if n in own_layers])
        for g in groups
    ]


def generate_scheduler_kv_cache_config(kv_cache_configs: list[KVCacheConfig]) -> KVCacheConfig:
    """What the scheduler needs of the workers' configs: the pages and the groups, which are the
    same in all.

    Raises:
        ValueError: they are not.
    """
    first = kv_cache_configs[0]
    for config in kv_cache_configs[1:]:
        same_groups = [g.kv_cache_spec for g in config.kv_cache_groups] == [
            g.kv_cache_spec for g in first.kv_cache_groups
        ]
        if config.num_blocks != first.num_blocks or not same_groups:
            raise ValueError("workers disagree on pages or groups of the KV cache")
    return copy.deepcopy(first)


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """Requests of `max_model_len` that the pages hold at once."""
    per_request = max_blocks_per_request(vllm_config, kv_cache_config.kv_cache_groups)
    num_usable = kv_cache_config.num_blocks - _NUM_NULL_BLOCKS
    return num_usable / per_request if per_request else math.inf


def get_kv_cache_capacity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[int, float]:
    """Tokens that the pages hold, and requests of `max_model_len` that they hold at once. With
    several groups, tokens of such requests: shorter ones leave their windows unfilled."""
    groups = kv_cache_config.kv_cache_groups
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    if len(groups) == 1:
        num_usable = kv_cache_config.num_blocks - _NUM_NULL_BLOCKS
        return num_usable * groups[0].kv_cache_spec.block_size, concurrency
    if math.isinf(concurrency):
        return 0, concurrency
    return int(concurrency * vllm_config.model_config.max_model_len), concurrency


def update_kv_cache_capacity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Writes pages and capacity into the cache config, and says them."""
    tokens, concurrency = get_kv_cache_capacity(vllm_config, kv_cache_config)
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    cache_config.kv_cache_size_tokens = tokens
    cache_config.kv_cache_max_concurrency = concurrency
    logger.info(
        "KV cache: %d pages, %s tokens, %.2f requests of %s tokens at once",
        kv_cache_config.num_blocks, f"{tokens:,}", concurrency,
        f"{vllm_config.model_config.max_model_len:,}",
    )  # fmt: skip


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> tuple[int, int]:
    """`scheduler_block_size` (the least common multiple of the groups' block sizes: prefix hits are
    multiples of it) and `hash_block_size` (their greatest common divisor: what is hashed at once),
    in tokens."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    sizes = sizes or [vllm_config.cache_config.block_size]
    return math.lcm(*sizes), math.gcd(*sizes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

# SPDX-License-Identifier: Apache-2.0
"""Backends as far as caches go: plain classes, as third parties hand them in."""

from __future__ import annotations

import torch

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.worker.utils import AttentionGroup


class KVFirst:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class BlocksFirstHND(BlocksFirst):
    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 1, 3, 2, 4)


class Interleaved(BlocksFirst):
    """K and V of a token beside each other in memory."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 2, 1, 3, 4)


class Fused:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class FusedNHD(Fused):
    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 2, 1, 3)


class State:
    """Of a recurrent layer; it has no cache of K and V."""


def full_spec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32, **kwargs):
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        **kwargs,
    )


def state_spec(page_bytes=512):
    """Two states, then padding."""
    return MambaSpec(
        block_size=16,
        shapes=((4, 3), (2, 3)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=page_bytes,
    )


def group(backend, spec, *names, group_id=0) -> AttentionGroup:
    return AttentionGroup(backend, list(names), spec, group_id)


def shared_config(num_blocks, groups, **tensor) -> KVCacheConfig:
    """One allocation that holds every layer of `groups`."""
    size = num_blocks * groups[0].kv_cache_spec.page_size_bytes
    names = [name for one in groups for name in one.layer_names]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[KVCacheTensor(size=size, shared_by=names, **tensor)],
        kv_cache_groups=[KVCacheGroupSpec(one.layer_names, one.kv_cache_spec) for one in groups],
    )

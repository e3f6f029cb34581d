# SPDX-License-Identifier: Apache-2.0
"""`_reshape_kv_cache` and `_align_mixed_attention_kv_cache_views`, through the public interface
alone: shapes, element strides and data pointers of the views that backends get.

NB=4 blocks, BS=16 tokens, H heads, D=4 elements of float32; shapes are logical.
"""

from __future__ import annotations

import pytest
import torch

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.worker.gpu.attn_utils import (
    _align_mixed_attention_kv_cache_views,
    _reshape_kv_cache,
    _restride_blocks_first_kv_cache_to_kv_first_storage,
)
from vllm.v1.worker.utils import AttentionGroup

NB, BS, D = 4, 16, 4


class KVFirst:
    """(2, NB, BS, H, D)"""

    @staticmethod
    def get_name():
        return "KV_FIRST"

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        raise NotImplementedError

    @classmethod
    def get_kv_cache_block_dim(cls, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return 1


class BlocksFirst(KVFirst):
    """(NB, 2, BS, H, D), in memory as it is."""

    @staticmethod
    def get_name():
        return "BLOCKS_FIRST"

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_block_dim(cls, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return 0


class BlocksFirstHND(BlocksFirst):
    """(NB, 2, BS, H, D), in memory (NB, 2, H, BS, D)."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 1, 3, 2, 4)


class Fused(BlocksFirst):
    """(NB, H, BS, 2 * D), in memory as it is."""

    @staticmethod
    def get_name():
        return "FUSED"

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class State(BlocksFirst):
    """Of a recurrent layer."""

    @staticmethod
    def get_name():
        return "STATE"


def attention_spec(heads=1, block_size=BS, **kwargs):
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=D, dtype=torch.float32, **kwargs
    )


def views(*backends, heads=1, spec=None, kernel_block_size=BS, with_config=True):
    """One layer and group a backend, all in one allocation."""
    spec = spec or attention_spec(heads)
    page = spec.page_size_bytes
    state = MambaSpec(block_size=BS, shapes=((page // 4,),), dtypes=(torch.float32,))
    specs = [state if backend is State else spec for backend in backends]
    names = [f"layers.{i}.attn" for i in range(len(backends))]
    groups = [
        AttentionGroup(backend, [name], one, group_id)
        for group_id, (backend, name, one) in enumerate(zip(backends, names, specs))
    ]
    raw = torch.zeros(NB * page, dtype=torch.int8)
    config = KVCacheConfig(
        num_blocks=NB,
        kv_cache_tensors=[KVCacheTensor(size=raw.numel(), shared_by=names)],
        kv_cache_groups=[KVCacheGroupSpec([n], one) for n, one in zip(names, specs)],
    )
    raws = dict.fromkeys(names, raw)
    sizes = [BS if backend is State else kernel_block_size for backend in backends]
    extra = {"kv_cache_config": config} if with_config else {}
    caches = _reshape_kv_cache(groups, raws, "auto", sizes, {}, **extra)
    assert all(caches[name].data_ptr() == raw.data_ptr() for name in names)
    return [caches[name] for name in names]


@pytest.mark.parametrize(
    ("backend", "shape", "strides"),
    [
        (KVFirst, (2, NB, BS, 3, D), (768, 192, 12, 4, 1)),
        (BlocksFirst, (NB, 2, BS, 3, D), (384, 192, 12, 4, 1)),
        (BlocksFirstHND, (NB, 2, BS, 3, D), (384, 192, 4, 64, 1)),
        (Fused, (NB, 3, BS, 2 * D), (384, 128, 8, 1)),
    ],
)
def test_alone(backend, shape, strides):
    """As the backend declares it; K/V-first keeps two contiguous halves."""
    (view,) = views(backend, heads=3)
    assert view.shape == shape and view.stride() == strides


def test_kernel_blocks_smaller_than_pages():
    (view,) = views(BlocksFirst, spec=attention_spec(block_size=32), kernel_block_size=16)
    assert view.shape == (2 * NB, 2, 16, 1, D) and view.is_contiguous()


@pytest.mark.parametrize(
    ("backend", "strides"),
    [(BlocksFirst, (160, 64, 4, 4, 1)), (BlocksFirstHND, (160, 64, 4, 64, 1))],
)
def test_padded(backend, strides):
    """640 bytes a page of 512: blocks stride by the page, K and V by half of the unpadded one."""
    (view,) = views(backend, spec=attention_spec(page_size_padded=640))
    assert view.stride() == strides


def test_kv_first_beside_a_recurrent_layer():
    """Page by page, its shape unchanged; the state is a page of bytes."""
    view, state = views(KVFirst, State)
    assert view.shape == (2, NB, BS, 1, D) and view.stride() == (64, 128, 4, 4, 1)
    assert state.shape == (NB, 1, 1, 512) and state.dtype == torch.int8


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_blocks_first_beside_kv_first(heads, order):
    """Storage stays K/V-first; blocks-first gets strides (page / 2, NB * page / 2, tail)."""
    half = BS * heads * D
    pair = (KVFirst, BlocksFirst)[::order]
    first, blocks = views(*pair, heads=heads)[::order]
    assert first.is_contiguous()
    assert blocks.shape == (NB, 2, BS, heads, D)
    assert blocks.stride() == (half, NB * half, heads * D, D, 1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_hnd_blocks_first_beside_kv_first(heads):
    """The tail stays HND."""
    half = BS * heads * D
    first, blocks = views(KVFirst, BlocksFirstHND, heads=heads)
    assert first.is_contiguous() and blocks.stride() == (half, NB * half, D, BS * D, 1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_fused_beside_kv_first(heads):
    """K/V-first goes page by page: page 1 of one is page 1 of the other. With two heads the fused
    cache looks as if its heads were K and V."""
    first, fused = views(KVFirst, Fused, heads=heads)
    assert first.shape == (2, NB, BS, heads, D) and fused.is_contiguous()
    fused[1] = 1
    assert first[:, 1].eq(1).all() and first.count_nonzero() == fused[1].numel()


def test_same_layouts_are_left_alone():
    for pair in ((KVFirst, KVFirst), (BlocksFirst, BlocksFirst), (BlocksFirst, Fused)):
        assert all(view.is_contiguous() for view in views(*pair))


def test_called_by_itself():
    """In place, on views that exist."""
    spec = attention_spec()
    raw = torch.zeros(NB * 512, dtype=torch.int8)
    caches = {
        "a": raw.view(torch.float32).view(2, NB, BS, 1, D),
        "b": raw.view(torch.float32).view(NB, 2, BS, 1, D),
    }
    blocks = caches["b"]
    groups = [AttentionGroup(KVFirst, ["a"], spec, 0), AttentionGroup(BlocksFirst, ["b"], spec, 1)]
    config = KVCacheConfig(
        num_blocks=NB,
        kv_cache_tensors=[KVCacheTensor(size=raw.numel(), shared_by=["a", "b"])],
        kv_cache_groups=[KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec(["b"], spec)],
    )
    _align_mixed_attention_kv_cache_views(groups, caches, [BS, BS], "auto", config, set())
    assert caches["b"] is blocks and blocks.stride() == (64, 256, 4, 4, 1)
    assert caches["a"].is_contiguous() and blocks.data_ptr() == raw.data_ptr()


def test_restriding_by_itself():
    cache = torch.zeros(NB, 2, BS, 3, D)
    _restride_blocks_first_kv_cache_to_kv_first_storage(cache)
    assert cache.shape == (NB, 2, BS, 3, D) and cache.stride() == (192, 768, 12, 4, 1)
    for shape in ((6, 2, 16, 32), (2, 6, 16, 1, 4), (6, 3, 16, 1, 4)):
        with pytest.raises(AssertionError):
            _restride_blocks_first_kv_cache_to_kv_first_storage(torch.zeros(shape))

# SPDX-License-Identifier: Apache-2.0
"""Weights in huge pages: each has bytes of its own, for as long as it lives."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from vllm.model_executor.layers.cpu_ops import weight_memory
from vllm.model_executor.layers.cpu_ops.weight_memory import empty_weight


def test_tensors_share_no_bytes():
    """Of many sizes, one larger than a region; whatever is freed in between."""
    sizes = [1, 63, 64, 65, 1 << 20, 70 << 20, 3, 40 << 20, 40 << 20, 5]
    tensors = {}
    for i, size in enumerate(sizes * 2):
        tensor = empty_weight(size, dtype=torch.uint8)
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        tensor[:1], tensor[-1:] = i, i
        tensors[i] = tensor
        if i % 3 == 1:
            del tensors[i - 1]
            gc.collect()
    assert all(tensor[0] == i and tensor[-1] == i for i, tensor in tensors.items())


@pytest.mark.skipif(weight_memory._ADVICE is None, reason="no huge pages: torch's own memory")
def test_a_large_weight_has_memory_of_its_own(monkeypatch):
    """Fault: it ends the region that small ones are put in, whose rest is lost, or its memory stays
    when it is gone."""
    regions, make = [], mmap.mmap

    def recorded(*args, **kwargs) -> mmap.mmap:
        region = make(*args, **kwargs)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(mmap, "mmap", recorded)
    monkeypatch.setattr(weight_memory, "_region", None)
    first = empty_weight(64, dtype=torch.uint8)
    open_region = weight_memory._region
    large = empty_weight(weight_memory._REGION_BYTES, dtype=torch.uint8)
    assert weight_memory._region is open_region
    second = empty_weight(64, dtype=torch.uint8)
    assert second.data_ptr() - first.data_ptr() == 64
    assert [region() is not None for region in regions] == [True, True]
    del large
    gc.collect()
    assert [region() is not None for region in regions] == [True, False]


def test_shapes_and_dtypes():
    tensor = empty_weight(3, 5, 2, dtype=torch.bfloat16)
    assert tensor.shape == (3, 5, 2) and tensor.dtype is torch.bfloat16
    assert tensor.copy_(torch.ones(3, 5, 2)).sum() == 30
    assert empty_weight(0, 4, dtype=torch.float32).shape == (0, 4)

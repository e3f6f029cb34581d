# SPDX-License-Identifier: Apache-2.0
"""Weights in huge pages: each has bytes of its own, for as long as it lives."""

from __future__ import annotations

import gc

import torch

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


def test_shapes_and_dtypes():
    tensor = empty_weight(3, 5, 2, dtype=torch.bfloat16)
    assert tensor.shape == (3, 5, 2) and tensor.dtype is torch.bfloat16
    assert tensor.copy_(torch.ones(3, 5, 2)).sum() == 30
    assert empty_weight(0, 4, dtype=torch.float32).shape == (0, 4)

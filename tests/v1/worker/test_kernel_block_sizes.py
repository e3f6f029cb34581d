# SPDX-License-Identifier: Apache-2.0
"""Kernel blocks: as large as all backends of a group take, a whole number of them in a page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.utils import (
    AttentionGroup,
    prepare_kernel_block_sizes,
    select_common_block_size,
)


def backend(*sizes):
    """A backend as far as block sizes go."""

    class Backend:
        @staticmethod
        def get_name() -> str:
            return "TAKES_" + "_".join(map(str, sizes))

        @staticmethod
        def get_supported_kernel_block_sizes():
            return list(sizes)

        @staticmethod
        def get_builder_cls():
            return Builder

    return Backend


class Builder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        self.kv_cache_spec = kv_cache_spec


@pytest.mark.parametrize(
    ("page", "backends", "expected"),
    [
        (16, [backend(MultipleOf(1))], 16),
        (32, [backend(16)], 16),
        (64, [backend(16, 32), backend(MultipleOf(16))], 32),
        (784, [backend(MultipleOf(16))], 784),
        (48, [backend(16, 32), backend(MultipleOf(8))], 16),
    ],
)
def test_largest_common_size(page, backends, expected):
    """Smaller blocks than need be cost table entries and launches."""
    assert select_common_block_size(page, backends) == expected


def test_no_common_size_is_refused_with_what_each_takes():
    """A page that is not a whole number of kernel blocks would be read across its end."""
    with pytest.raises(ValueError, match=r"page of 16 tokens.*TAKES_64 takes \[64\].*--block-size"):
        select_common_block_size(16, [backend(64)])


@given(st.integers(1, 600), st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_size_divides_the_page_and_suits_all(page, bases):
    """For any page: an exact number of kernel blocks, or a refusal."""
    backends = [backend(MultipleOf(base)) for base in bases]
    if any(page % base for base in bases):
        with pytest.raises(ValueError):
            select_common_block_size(page, backends)
    else:
        assert select_common_block_size(page, backends) == page


def group(spec, *backends):
    return [AttentionGroup(b, ["layer"], spec, 0) for b in backends]


def test_each_group_has_its_own_size():
    """One group's kernel must not shrink another's blocks."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [group(spec, backend(16)), group(spec, backend(MultipleOf(1)))]
    config = KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec(["b"], spec)],
    )
    assert prepare_kernel_block_sizes(config, groups) == [16, 32]


def test_builders_see_the_kernel_block():
    """A builder that multiplied by the page's tokens would address the wrong slots."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    (attention_group,) = group(spec, backend(16))
    attention_group.create_metadata_builders(None, torch.device("cpu"), 16, 2)
    assert len(attention_group.metadata_builders) == 2
    assert attention_group.get_metadata_builder(1).kv_cache_spec.block_size == 16
    assert attention_group.kv_cache_spec.block_size == 32

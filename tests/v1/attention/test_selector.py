# SPDX-License-Identifier: Apache-2.0
"""A backend for each kind of KV cache: `attention_config.backend_per_kind`."""

from __future__ import annotations

import pytest

from vllm.config.attention import AttentionConfig
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend, get_attn_spec_kind
from vllm.v1.kv_cache_interface import KVCacheSpecKind


@pytest.mark.parametrize(
    "use_mla, has_sliding_window, attn_type, kind",
    [
        (False, False, AttentionType.DECODER, KVCacheSpecKind.FULL_ATTENTION),
        (False, True, AttentionType.DECODER, KVCacheSpecKind.SLIDING_WINDOW),
        (True, True, AttentionType.DECODER, KVCacheSpecKind.FULL_ATTENTION),
        (False, False, AttentionType.ENCODER_DECODER, KVCacheSpecKind.CROSS_ATTENTION),
    ],
)
def test_kind_of_a_layer(use_mla, has_sliding_window, attn_type, kind):
    assert get_attn_spec_kind(use_mla, has_sliding_window, attn_type) is kind


def test_kind_wins_over_backend(monkeypatch):
    """Sliding layers take theirs, the rest the general one."""
    import torch

    asked = []
    monkeypatch.setattr(selector, "_cached_backend", lambda selected, *_: asked.append(selected))
    config = AttentionConfig(backend="CPU_ATTN", backend_per_kind={"sliding_window": "torch_attn"})

    class Config:
        attention_config = config
        kv_transfer_config = None

        class cache_config:
            user_specified_block_size, block_size = False, None

    monkeypatch.setattr(selector, "get_current_vllm_config", lambda: Config)
    for has_sliding_window in (True, False):
        get_attn_backend(64, torch.float32, "auto", has_sliding_window=has_sliding_window)
    assert asked == [AttentionBackendEnum.TORCH_ATTN, AttentionBackendEnum.CPU_ATTN]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"sliding": "CPU_ATTN"}, "unknown kind 'sliding'; known: full_attention, sliding_window"),
        ({"sliding_window": "XYZ"}, "unknown attention backend 'XYZ'"),
    ],
)
def test_unknown_names_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(backend_per_kind=given)


def test_auto_leaves_a_kind_to_the_platform():
    assert AttentionConfig(backend_per_kind={"full_attention": "auto"}).backend_per_kind == {
        "full_attention": None
    }

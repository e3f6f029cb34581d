# SPDX-License-Identifier: Apache-2.0
"""What several backends share: the tail order of their caches, scales in them, K and V as views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

import vllm.envs as envs
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_geometry import KVCacheGeometry, fused_fields, split_fields, storage_bytes
from vllm.v1.kv_cache_interface import get_kv_quant_mode

KVCacheLayoutType = Literal["NHD", "HND"]
PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0
SCALE_DTYPE = "float32"

_override: KVCacheLayoutType | None = None


def is_valid_kv_cache_layout(value: str) -> bool:
    return value in get_args(KVCacheLayoutType)


def get_kv_cache_layout() -> KVCacheLayoutType:
    """Whether a block is laid out token by token (NHD) or head by head (HND), in backends that do
    either: what was set, else VLLM_KV_CACHE_LAYOUT, else NHD.

    Raises:
        ValueError: VLLM_KV_CACHE_LAYOUT is neither.
    """
    layout = _override or envs.VLLM_KV_CACHE_LAYOUT or "NHD"
    if not is_valid_kv_cache_layout(layout):
        raise ValueError(f"VLLM_KV_CACHE_LAYOUT={layout!r} is no layout; set it to NHD or HND")
    return layout  # type: ignore[return-value]


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Wins over VLLM_KV_CACHE_LAYOUT until it is set to None."""
    global _override
    _override = cache_layout


def content_size(head_size: int, cache_dtype_str: str) -> int:
    """Elements of K, or of V, of one token and head: with a scale of its own if the cache has them,
    which takes the place of as many elements of one byte."""
    has_scales = get_kv_quant_mode(cache_dtype_str).is_per_token_head
    return head_size + (get_dtype_size(SCALE_DTYPE) if has_scales else 0)


class KeyValueViews(NamedTuple):
    """K and V: views (NB, BS, H, D) of a cache; scales (NB, BS, H) if it has them."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


def key_value_views(
    kv_cache: torch.Tensor, roles: Sequence[str], head_size: int, cache_dtype_str: str = "auto"
) -> KeyValueViews:
    """The parts of a cache whose dimensions have these roles."""
    has_scales = get_kv_quant_mode(cache_dtype_str).is_per_token_head
    make_fields = split_fields if "kv" in roles else fused_fields
    fields = make_fields(
        head_size, kv_cache.dtype, scale_dtype=SCALE_DTYPE if has_scales else None
    )
    geometry = KVCacheGeometry.observe(kv_cache, roles, fields=fields)
    raw = storage_bytes(kv_cache)
    views = KeyValueViews(*geometry.key_value(raw))
    if not has_scales:
        return views
    return views._replace(
        key_scale=geometry.part(raw, "key_scale").squeeze(-1),
        value_scale=geometry.part(raw, "value_scale").squeeze(-1),
    )

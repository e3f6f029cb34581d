# SPDX-License-Identifier: Apache-2.0
"""KV-cache layouts for tests: the named ones, and any (hypothesis)."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_geometry import KVCacheGeometry, fused_fields

KV_FIRST = ("kv", "block", "token", "head", "content")
BLOCKS_FIRST = ("block", "kv", "token", "head", "content")
FUSED = ("block", "head", "token", "content")
NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)
DTYPES = ("int8", "bfloat16", "float32", "float8_e4m3fn")


def kv_first(nb, bs, h, d, order=NHD, dtype="float32", r=1, **kwargs) -> KVCacheGeometry:
    """(2, NB * r, BS, H, D); NB pages of r kernel blocks of BS tokens."""
    return KVCacheGeometry.plan(
        KV_FIRST, (2, nb * r, bs, h, d), order, dtype, nb, kernel_blocks_per_page=r, **kwargs
    )


def blocks_first(nb, bs, h, d, order=NHD, dtype="float32", r=1, **kwargs) -> KVCacheGeometry:
    """(NB * r, 2, BS, H, D)."""
    return KVCacheGeometry.plan(
        BLOCKS_FIRST, (nb * r, 2, bs, h, d), order, dtype, nb, kernel_blocks_per_page=r, **kwargs
    )


def fused(nb, bs, h, d, order=(0, 1, 2, 3), dtype="float32", r=1, **kwargs) -> KVCacheGeometry:
    """(NB * r, H, BS, 2 * D); HND as it is, NHD with order (0, 2, 1, 3)."""
    kwargs.setdefault("fields", fused_fields(d, dtype))
    return KVCacheGeometry.plan(
        FUSED, (nb * r, h, bs, 2 * d), order, dtype, nb, kernel_blocks_per_page=r, **kwargs
    )


@st.composite
def geometries(draw, max_pages: int = 4) -> KVCacheGeometry:
    """Any roles in any logical order, any stride order, dtype, kernel blocks, gaps and offset."""
    optional = [role for role in ("layer", "kv", "head") if draw(st.booleans())]
    roles = draw(st.permutations(["block", "token", "content", *optional]))
    dtype = draw(st.sampled_from(DTYPES))
    pages, per_page = draw(st.integers(1, max_pages)), draw(st.integers(1, 3))
    sizes = {"block": pages * per_page, "kv": 2}
    shape = [sizes.get(role) or draw(st.integers(1, 3)) for role in roles]
    itemsize = get_dtype_size(dtype)
    pitch = None
    if draw(st.booleans()):
        block_bytes = math.prod(shape) // sizes["block"] * itemsize
        pitch = (block_bytes + draw(st.integers(0, 3)) * itemsize) * per_page
    return KVCacheGeometry.plan(
        roles,
        shape,
        draw(st.permutations(range(len(roles)))),
        dtype,
        pages,
        offset=draw(st.integers(0, 8)) * itemsize,
        pitch=pitch,
        kernel_blocks_per_page=per_page,
    )


def page_bytes(geometry: KVCacheGeometry, page: int) -> set[int]:
    """The bytes of a page, one by one."""
    return {b for start, n in geometry.page_runs(page) for b in range(start, start + n)}

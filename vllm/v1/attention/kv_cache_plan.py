# SPDX-License-Identifier: Apache-2.0
"""The geometry of a layer's cache from what its backend declares and its spec asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm.utils.math_utils import exact_div
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import probe_backend_roles
from vllm.v1.kv_cache_geometry import (
    Field,
    KVCacheGeometry,
    fused_fields,
    latent_fields,
    split_fields,
    state_fields,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec

# Of a recurrent layer's pages, (num_pages, 1, 1, page_bytes).
STATE_ROLES = ("block", "head", "token", "content")


@dataclass(frozen=True)
class BackendLayout:
    """What a backend says of its cache. `order`: see `get_kv_cache_stride_order`; None: as the
    shape is."""

    name: str
    roles: tuple[str, ...]
    order: tuple[int, ...] | None
    takes_strides: bool


def backend_layout(backend: type, cache_dtype: str) -> BackendLayout:
    """What `backend` says, or what probing finds: it may be a plain class with nothing but
    `get_kv_cache_shape`.

    Raises:
        ValueError: probing does not tell.
    """
    try:
        order = tuple(backend.get_kv_cache_stride_order())
    except (AttributeError, NotImplementedError):
        order = None
    reads_strides = getattr(backend, "reads_kv_cache_strides", None)
    get_name = getattr(backend, "get_name", None)
    return BackendLayout(
        get_name() if get_name else backend.__qualname__,
        _roles(backend, cache_dtype),
        order,
        reads_strides() if reads_strides else True,
    )


@lru_cache(maxsize=256)
def _roles(backend: type, cache_dtype: str) -> tuple[str, ...]:
    declared = getattr(backend, "get_kv_cache_roles", None)
    return declared(cache_dtype) if declared else probe_backend_roles(backend, cache_dtype)


def content_fields(
    spec: AttentionSpec, roles: tuple[str, ...], shape: Sequence[int]
) -> tuple[Field, ...]:
    """What the content dimension holds; empty where the backend has its own idea of it."""
    if roles.count("content") != 1 or len(shape) != len(roles):
        return ()
    content_size = shape[roles.index("content")]
    scale = "float32" if spec.kv_quant_mode.is_per_token_head else None
    if "kv" in roles:
        fields = split_fields(spec.head_size, spec.dtype, scale_dtype=scale)
    elif content_size == spec.head_size:
        fields = latent_fields(spec.head_size, spec.dtype)
    else:
        v_size = spec.head_size_v
        fields = fused_fields(spec.head_size, spec.dtype, head_size_v=v_size, scale_dtype=scale)
    fits = sum(f.nbytes for f in fields) == content_size * get_dtype_size(spec.dtype)
    return fields if fits else ()


def plan_attention_cache(
    spec: AttentionSpec,
    roles: tuple[str, ...],
    shape: tuple[int, ...],
    order: tuple[int, ...] | None,
    nbytes: int,
    packing: tuple[int, int] | None = None,
    page_by_page: bool = False,
) -> KVCacheGeometry:
    """A cache of `shape` in an allocation of `nbytes`. Padded and packed pages, and those that are
    asked to, lie one after the other; others as the backend's `order` has them.

    Args:
        packing: (offset, block_stride) of a packed allocation.

    Raises:
        ValueError: pages do not fill the allocation, or kernel blocks the pages.
    """
    offset, pitch = packing or (0, spec.page_size_bytes)
    num_pages = exact_div(nbytes, pitch)
    kernel_blocks_per_page = exact_div(shape[roles.index("block")], num_pages)
    if packing and kernel_blocks_per_page > 1 and pitch != spec.page_size_bytes:
        raise ValueError(
            f"pages of {kernel_blocks_per_page} kernel blocks cannot interleave with those of "
            "other layers; set --block-size to the tokens of a kernel block"
        )
    padded = spec.page_size_bytes != spec.real_page_size_bytes
    return KVCacheGeometry.plan(
        roles,
        shape,
        order,
        spec.dtype,
        num_pages,
        offset=offset,
        pitch=pitch if packing or padded or page_by_page else None,
        kernel_blocks_per_page=kernel_blocks_per_page,
        fields=content_fields(spec, roles, shape),
    )


def plan_state_cache(
    spec: KVCacheSpec, nbytes: int, packing: tuple[int, int] | None = None
) -> KVCacheGeometry:
    """Pages of a layer that keeps states, not K and V: (num_pages, 1, 1, page_bytes) int8."""
    offset, pitch = packing or (0, spec.page_size_bytes)
    num_pages, page = exact_div(nbytes, pitch), spec.page_size_bytes
    states = _states(spec)
    return KVCacheGeometry.plan_state(*states, num_pages, page, offset=offset, pitch=pitch)


def _states(spec: KVCacheSpec) -> tuple[tuple, tuple]:
    """Shapes and dtypes of a recurrent layer's states, as far as they are known."""
    return (spec.shapes, spec.dtypes) if isinstance(spec, MambaSpec) else ((), ())


def plan_layer(
    backend: type,
    spec: KVCacheSpec,
    cache_dtype: str,
    kernel_block_size: int,
    nbytes: int,
    packing: tuple[int, int] | None = None,
    page_by_page: bool = False,
) -> KVCacheGeometry:
    """The geometry of a layer's cache in an allocation of `nbytes`; see `plan_attention_cache`.

    Raises:
        ValueError: as there, or the backend's kernels cannot read such pages.
    """
    if not isinstance(spec, AttentionSpec):
        return plan_state_cache(spec, nbytes, packing)
    layout = backend_layout(backend, cache_dtype)
    pitch = packing[1] if packing else spec.page_size_bytes
    num_blocks = exact_div(nbytes, pitch) * exact_div(spec.block_size, kernel_block_size)
    shape = backend.get_kv_cache_shape(
        num_blocks, kernel_block_size, spec.num_kv_heads, spec.head_size, cache_dtype
    )
    arguments = spec, layout.roles, tuple(shape), layout.order, nbytes
    planned = plan_attention_cache(*arguments, packing, page_by_page)
    if not layout.takes_strides:
        dense = KVCacheGeometry.plan(
            layout.roles,
            shape,
            layout.order,
            spec.dtype,
            planned.num_pages,
            kernel_blocks_per_page=planned.kernel_blocks_per_page,
            fields=planned.fields,
        )
        if (planned.dims, planned.offset) != (dense.dims, dense.offset):
            raise ValueError(
                f"{layout.name} does not read the strides of its cache, but pages of "
                f"{planned.payload} bytes lie {planned.pitch} bytes apart here; set "
                "--attention-backend to one that does"
            )
    return planned


def observe_layer(
    kv_cache: torch.Tensor,
    backend: type,
    spec: KVCacheSpec,
    cache_dtype: str,
    kernel_block_size: int,
) -> KVCacheGeometry:
    """The geometry of a layer's cache as it is; its offset counts from the start of the storage.

    Raises:
        ValueError: the tensor is not of the backend's dimensions.
    """
    if not isinstance(spec, AttentionSpec):
        fields = state_fields(*_states(spec), spec.page_size_bytes)
        return KVCacheGeometry.observe(kv_cache, STATE_ROLES, fields=fields)
    roles = backend_layout(backend, cache_dtype).roles
    return KVCacheGeometry.observe(
        kv_cache,
        roles,
        kernel_blocks_per_page=exact_div(spec.block_size, kernel_block_size),
        fields=content_fields(spec, roles, kv_cache.shape),
    )

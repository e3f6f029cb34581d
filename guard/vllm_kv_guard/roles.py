# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a layer's cache mean, and in which orders its backend reads them.

Up to vLLM 0.28 a backend says so by `get_kv_cache_shape`, which is asked for distinct sizes, and
`get_kv_cache_stride_order`. From 0.29 on all caches are `[L, B, H, N, C]` - layers, blocks, heads,
tokens, content - in one of six orders, named by the config; a layer's is a view of the last four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kv_guard.kv_cache_geometry import probe_roles
from vllm_kv_guard.kv_cache_geometry.permutation import PERMUTATIONS, ROLE_OF_LETTER

if TYPE_CHECKING:
    import torch

_LATER_ROLES = ("block", "head", "token", "content")


@dataclass(frozen=True)
class Layout:
    """`roles`: of the tensor's dimensions. `orders`: those that are right, roles from the slowest to
    the fastest in memory; none: it is not known. `name`: of the order, from 0.29 on."""

    roles: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...] = ()
    name: str | None = None


def layout_of(
    backend: Any, layer: Any, tensor: torch.Tensor, kv_cache_config: Any, name: str
) -> Layout:
    """
    Raises:
        ValueError: it cannot be told.
    """
    if hasattr(backend, "get_kv_cache_shape"):
        roles = _probed_roles(backend, layer, name)
        return Layout(roles, _declared_orders(backend, roles))
    if not hasattr(backend, "supported_kv_cache_layouts"):
        raise ValueError(f"{name} does not tell the layout of its cache")
    roles = _LATER_ROLES
    if tensor.dim() == 3:
        roles = ("block", "token", "content")  # A latent cache has no heads.
    if tensor.dim() != len(roles):
        shape = tuple(tensor.shape)
        raise ValueError(f"its cache of shape {shape} is no (blocks, heads, tokens, content)")
    return _later_layout(backend, roles, getattr(kv_cache_config, "kv_cache_layout", None))


def _later_layout(backend: Any, roles: tuple[str, ...], chosen: Any) -> Layout:
    """The order that the config names is the right one if the backend reads it. Where it does not,
    or none is named, any that the backend reads is right."""
    supported = backend.supported_kv_cache_layouts()
    names = PERMUTATIONS if supported is None else tuple(map(_letters, supported))
    name = None if chosen is None else _letters(chosen)
    right = [name] if name in names else names
    return Layout(roles, tuple(_order(letters, roles) for letters in right), name)


def _letters(layout: Any) -> str:
    return getattr(layout, "name", layout)


def _order(letters: str, roles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(role for role in map(ROLE_OF_LETTER.get, letters) if role in roles)


def _probed_roles(backend: Any, layer: Any, name: str) -> tuple[str, ...]:
    sizes = getattr(backend, "get_supported_kernel_block_sizes", list)()
    head_sizes = getattr(backend, "get_supported_head_sizes", list)()
    dtype = getattr(layer, "kv_cache_dtype", "auto")
    return probe_roles(
        backend.get_kv_cache_shape,
        dtype if isinstance(dtype, str) else "auto",
        block_sizes=[size for size in sizes if isinstance(size, int)],
        head_sizes=list(head_sizes),
        name=name,
    )


def _declared_orders(backend: Any, roles: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """None as well where roles are not all different, which then cannot be told apart."""
    if len(set(roles)) != len(roles):
        return ()
    try:
        order = backend.get_kv_cache_stride_order()
    except NotImplementedError:
        return (roles,)
    except AttributeError:
        return ()
    return (tuple(roles[dim] for dim in order),)

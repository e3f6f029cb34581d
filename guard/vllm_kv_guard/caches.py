# SPDX-License-Identifier: Apache-2.0
"""The caches of a vLLM worker's layers, as geometries.

What is asked of vLLM: the layers in `compilation_config.static_forward_context` with their
`kv_cache` and backend, and the groups of the `KVCacheConfig`. Roles of dimensions are those that the
backend's `get_kv_cache_shape` tells when asked for distinct sizes; never guessed from actual ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kv_guard.kv_cache_geometry import KVCacheGeometry, probe_roles

if TYPE_CHECKING:
    import torch

# Of later releases, where a layer's cache is a view (blocks, heads, tokens, content) in any order.
_LATER_ROLES = ("block", "head", "token", "content")


@dataclass(frozen=True)
class LayerCache:
    """One cache tensor of a layer; recurrent layers have several. `kind`: its layout in a word.
    `declared_order`: roles from the slowest to the fastest, as the backend has them in memory; None
    if it does not say."""

    name: str
    layer: str
    group: int
    alias_of: str | None
    backend: str
    tensor: torch.Tensor
    geometry: KVCacheGeometry
    declared_order: tuple[str, ...] | None

    @property
    def mis_stride(self) -> str | None:
        """How memory is in another order than the backend declares. Only K and V may be moved out
        of their blocks: that is how blocks-first caches share K/V-first storage. Any other dimension
        that was moved is one that was taken for K and V."""
        if self.declared_order is None:
            return None
        sizes = {dim.role: dim.size for dim in self.geometry.dims}

        def order(roles: tuple[str, ...]) -> list[str]:
            return [role for role in roles if role != "kv" and sizes[role] > 1]

        found, declared = order(self.geometry.memory_roles), order(self.declared_order)
        if found == declared:
            return None
        return (
            f"layer {self.name} is in memory by {', '.join(found)}, but {self.backend} reads it by "
            f"{', '.join(declared)}: {self.geometry.describe()}"
        )

    @property
    def kind(self) -> str:
        roles = self.geometry.roles
        if "token" not in roles:
            return "state"
        if "kv" not in roles:
            return "fused"
        return "K/V-first" if self.geometry.is_kv_first else "blocks-first"


def layer_caches(worker: Any, kv_cache_config: Any) -> Iterator[LayerCache | str]:
    """Every cache of the worker; a text instead where one cannot be looked at."""
    layers = _compilation_config(worker).static_forward_context
    specs, groups = {}, {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            groups[name], specs[name] = number, _spec_of(group.kv_cache_spec, name)
    for name, layer in layers.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        group = groups.get(name, groups.get(target))
        if group is None:
            continue  # A layer without a cache.
        spec = specs.get(name, specs.get(target))
        try:
            yield from _caches_of(name, layer, group, target, spec, kv_cache_config.num_blocks)
        except (ValueError, AttributeError, TypeError, NotImplementedError) as error:
            yield f"{name}: {error}"


def _compilation_config(worker: Any) -> Any:
    return worker.vllm_config.compilation_config


def _spec_of(spec: Any, name: str) -> Any:
    """A group of layers of one type but several shapes has a spec for each."""
    inner = getattr(spec, "kv_cache_specs", None)
    return inner[name] if isinstance(inner, dict) else spec


def _caches_of(
    name: str, layer: Any, group: int, target: str | None, spec: Any, num_blocks: int
) -> Iterator[LayerCache]:
    tensors = list(_tensors(layer.kv_cache))
    if not tensors:
        raise ValueError("no cache is bound to it")
    is_attention = hasattr(spec, "num_kv_heads")
    backend = _backend(layer)
    for number, tensor in enumerate(tensors):
        if is_attention and len(tensors) == 1:
            full, roles = name, _roles(backend, spec, layer, tensor)
            order = _declared_order(backend, roles)
        else:
            full, roles = f"{name}[{number}]", ("block", *["content"] * (tensor.dim() - 1))
            order = None
        geometry = KVCacheGeometry.observe(
            tensor, roles, kernel_blocks_per_page=_ratio(tensor, roles, num_blocks), fields=()
        )
        alias = target if target is None or full == name else f"{target}[{number}]"
        names = full, name, group, alias, _backend_name(backend)
        yield LayerCache(*names, tensor, geometry, order)


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Of a tensor, a list of them (one for each virtual engine of old), or a tuple of states."""
    if isinstance(cache, list | tuple):
        for inner in cache:
            yield from _tensors(inner)
    elif cache is not None and cache.numel():
        yield cache


def _backend(layer: Any) -> type | None:
    backend = getattr(layer, "attn_backend", None)
    return backend if backend is not None else layer.get_attn_backend()


def _backend_name(backend: type | None) -> str:
    get_name = getattr(backend, "get_name", None)
    return get_name() if get_name else getattr(backend, "__qualname__", "unknown")


def _roles(backend: Any, spec: Any, layer: Any, tensor: torch.Tensor) -> tuple[str, ...]:
    shape = getattr(backend, "get_kv_cache_shape", None)
    if shape is None:
        if tensor.dim() == len(_LATER_ROLES):
            return _LATER_ROLES
        raise ValueError(f"{_backend_name(backend)} does not tell the shape of its cache")
    sizes = getattr(backend, "get_supported_kernel_block_sizes", list)()
    head_sizes = getattr(backend, "get_supported_head_sizes", list)()
    dtype = getattr(layer, "kv_cache_dtype", "auto")
    return probe_roles(
        shape,
        dtype if isinstance(dtype, str) else "auto",
        block_sizes=[size for size in sizes if isinstance(size, int)],
        head_sizes=list(head_sizes),
        name=_backend_name(backend),
    )


def _declared_order(backend: Any, roles: tuple[str, ...]) -> tuple[str, ...] | None:
    """None as well where roles are not all different, which then cannot be told apart."""
    if len(set(roles)) != len(roles):
        return None
    try:
        order = backend.get_kv_cache_stride_order()
    except NotImplementedError:
        return roles
    except AttributeError:
        return None
    return tuple(roles[dim] for dim in order)


def _ratio(tensor: torch.Tensor, roles: tuple[str, ...], num_blocks: int) -> int:
    rows = tensor.shape[roles.index("block")]
    ratio, rest = divmod(rows, num_blocks)
    if rest or not ratio:
        raise ValueError(
            f"{rows} blocks in its cache of shape {tuple(tensor.shape)} are no multiple of the "
            f"{num_blocks} pages that the manager hands out"
        )
    return ratio

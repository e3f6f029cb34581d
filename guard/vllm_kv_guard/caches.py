# SPDX-License-Identifier: Apache-2.0
"""The caches of a vLLM worker's layers, as geometries.

What is asked of vLLM: the layers in `compilation_config.static_forward_context` with their
`kv_cache` and backend, and the groups of the `KVCacheConfig`. Roles of dimensions are those that the
backend tells, never guessed from actual sizes: `roles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kv_guard.kv_cache_geometry import KVCacheGeometry
from vllm_kv_guard.roles import Layout, layout_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerCache:
    """One cache tensor of a layer; recurrent layers have several. `is_transferred`: whether KV
    connectors get it."""

    name: str
    layer: str
    group: int
    alias_of: str | None
    backend: str
    tensor: torch.Tensor
    geometry: KVCacheGeometry
    layout: Layout
    is_transferred: bool = True

    @property
    def mis_stride(self) -> str | None:
        """How memory is in another order than the backend reads. Only K and V may be moved out of
        their blocks: that is how blocks-first caches share K/V-first storage. Any other dimension
        that was moved is one that was taken for K and V."""
        sizes = {dim.role: dim.size for dim in self.geometry.dims}

        def order(roles: tuple[str, ...]) -> list[str]:
            return [role for role in roles if role != "kv" and sizes[role] > 1]

        found = order(self.geometry.memory_roles)
        declared = [order(roles) for roles in self.layout.orders]
        if not declared or found in declared:
            return None
        reads = " or ".join(", ".join(roles) for roles in declared)
        return (
            f"layer {self.name} is in memory by {', '.join(found)}, but {self.backend} reads it by "
            f"{reads}: {self.geometry.describe()}"
        )

    @property
    def kind(self) -> str:
        if self.layout.name is not None:
            return self.layout.name
        roles = self.geometry.roles
        if "token" not in roles:
            return "state"
        if "kv" not in roles:
            return "fused"
        return "K/V-first" if self.geometry.is_kv_first else "blocks-first"


def layer_caches(worker: Any, kv_cache_config: Any) -> Iterator[LayerCache | str]:
    """Every cache of the worker; a text instead where one cannot be looked at."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    groups = _groups(kv_cache_config)
    for name, layer in layers.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        group = groups.get(name, groups.get(target))
        if group is None:
            continue  # A layer without a cache.
        try:
            yield from _caches_of(name, layer, group, target, kv_cache_config)
        except (ValueError, AttributeError, TypeError, NotImplementedError) as error:
            yield f"{name}: {error}"


@dataclass(frozen=True)
class _Group:
    """Of a layer: its group's number, its own spec, and whether connectors get the group."""

    number: int
    spec: Any
    is_transferred: bool


def _groups(kv_cache_config: Any) -> dict[str, _Group]:
    found = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        transferred = getattr(group, "enable_kv_transfer", True)
        for name in group.layer_names:
            found[name] = _Group(number, _spec_of(group.kv_cache_spec, name), transferred)
    return found


def _spec_of(spec: Any, name: str) -> Any:
    """A group of layers of one type but several shapes has a spec for each."""
    inner = getattr(spec, "kv_cache_specs", None)
    return inner[name] if isinstance(inner, dict) else spec


def _caches_of(
    name: str, layer: Any, group: _Group, target: str | None, kv_cache_config: Any
) -> Iterator[LayerCache]:
    tensors = list(tensors_of(layer.kv_cache))
    if not tensors:
        raise ValueError("no cache is bound to it")
    is_attention = hasattr(group.spec, "num_kv_heads")
    backend = _backend(layer)
    for number, tensor in enumerate(tensors):
        if is_attention and len(tensors) == 1:
            full = name
            layout = layout_of(backend, layer, tensor, kv_cache_config, backend_name(backend))
        else:
            full, layout = f"{name}[{number}]", Layout(("block", *["content"] * (tensor.dim() - 1)))
        ratio = _ratio(tensor, layout.roles, kv_cache_config.num_blocks)
        geometry = KVCacheGeometry.observe(
            tensor, layout.roles, kernel_blocks_per_page=ratio, fields=()
        )
        alias = target if target is None or full == name else f"{target}[{number}]"
        names = full, name, group.number, alias, backend_name(backend)
        yield LayerCache(*names, tensor, geometry, layout, group.is_transferred)


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors in a layer's cache: one, a list of them (one for each virtual engine of old), or a
    tuple of states."""
    if isinstance(cache, list | tuple):
        for inner in cache:
            yield from tensors_of(inner)
    elif cache is not None and cache.numel():
        yield cache


def _backend(layer: Any) -> type | None:
    backend = getattr(layer, "attn_backend", None)
    return backend if backend is not None else layer.get_attn_backend()


def backend_name(backend: type | None) -> str:
    """Its name in vLLM; the class as well where it is not one of vLLM's."""
    get_name = getattr(backend, "get_name", None)
    qualified = f"{getattr(backend, '__module__', '')}.{getattr(backend, '__qualname__', 'unknown')}"
    name = get_name() if get_name else qualified
    if qualified.startswith("vllm.") or qualified.endswith(f".{name}"):
        return name
    return f"{name} ({qualified})"


def _ratio(tensor: torch.Tensor, roles: tuple[str, ...], num_blocks: int) -> int:
    rows = tensor.shape[roles.index("block")]
    ratio, rest = divmod(rows, num_blocks)
    if rest or not ratio:
        raise ValueError(
            f"{rows} blocks in its cache of shape {tuple(tensor.shape)} are no multiple of the "
            f"{num_blocks} pages that the manager hands out"
        )
    return ratio

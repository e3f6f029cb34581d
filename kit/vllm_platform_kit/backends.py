# SPDX-License-Identifier: Apache-2.0
"""The attention backends that a platform can select, and what each declares of its cache."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from vllm_platform_kit.findings import Finding
from vllm_platform_kit.kv_cache_geometry import probe_roles
from vllm_platform_kit.target import Target

REQUIRED = ("get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape")
HEAD_SIZES = (64, 128, 32, 96, 256)
KERNEL_BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 1)
LAYOUTS = ("NHD", "HND")
# What a layer asks for: attn_type and whether it has a sliding window.
KINDS = {
    "full attention": ("decoder", False),
    "sliding window": ("decoder", True),
    "cross-attention": ("encoder_decoder", False),
}


@dataclass(frozen=True)
class Selectable:
    """A backend, the choices that lead to it, and the kinds of layers that it serves unasked."""

    backend: type
    asked_as: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return backend_name(self.backend)

    @property
    def line(self) -> str:
        """When it is chosen, in words."""
        asked = ", ".join(self.asked_as) or "nothing"
        if len(self.asked_as) > 5:
            asked = f"any of {len(self.asked_as)} names"
        return f"{self.name} for {', '.join(self.kinds) or 'none unasked'}; asked for as {asked}"


def backend_name(backend: type) -> str:
    """What it calls itself, and its class where that is what any may be called."""
    get_name = getattr(backend, "get_name", None)
    name = get_name() if get_name else backend.__qualname__
    return f"CUSTOM {backend.__qualname__}" if name == "CUSTOM" else name


@cache
def selectable_backends(target: Target) -> tuple[list[Selectable], list[Finding], list[str]]:
    """The backends, what is wrong with a choice, and in a note each what was refused."""
    found: dict[type, tuple[list[str], list[str]]] = {}
    findings, notes = [], []
    for asked, kind in _choices():
        try:
            path = _select(target, asked, kind)
        except (ValueError, NotImplementedError, ImportError) as error:
            if asked is None:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                notes.append(f"no backend for {kind}: {first}")
            continue
        except Exception as error:
            subject = f"{target.platform_cls.__qualname__}.get_attn_backend_cls"
            what = f"for {kind} with {_label(asked)}: {type(error).__name__}: {error}"
            findings.append(Finding("HOOK_RAISES", subject, what))
            continue
        backend = _resolve(path)
        if isinstance(backend, str):
            findings.append(Finding("BACKEND", str(path), backend))
            continue
        choices, kinds = found.setdefault(backend, ([], []))
        if asked is None:
            kinds.append(kind)
        elif asked.name not in choices:
            choices.append(asked.name)
    backends = [Selectable(one, tuple(a), tuple(b)) for one, (a, b) in found.items()]
    return backends, list(dict.fromkeys(findings)), notes


def _label(asked) -> str:
    return "no backend asked for" if asked is None else asked.name


def _choices() -> Iterator[tuple[object, str]]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for kind in KINDS:
        yield None, kind
    for member in AttentionBackendEnum:
        yield member, "full attention"


def _select(target: Target, asked, kind: str) -> str:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    attn_type, has_window = KINDS[kind]
    wanted = {
        "head_size": HEAD_SIZES[0],
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "attn_type": attn_type,
        "has_sliding_window": has_window,
    }
    known = {k: v for k, v in wanted.items() if k in AttentionSelectorConfig._fields}
    config = AttentionSelectorConfig(**known)
    path = target.platform_cls().get_attn_backend_cls(asked, config, num_heads=2)
    if not path:
        raise ValueError("it names none")
    return path


def _resolve(path: str) -> type | str:
    """The class, or what is wrong with the name."""
    module, _, name = str(path).rpartition(".")
    try:
        backend = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return f"it cannot be imported: {error}"
    missing = [one for one in REQUIRED if getattr(backend, one, None) is None]
    abstract = [one for one in REQUIRED if one in getattr(backend, "__abstractmethods__", ())]
    if missing or abstract:
        return f"it has no {', '.join(missing or abstract)}"
    return backend


@dataclass(frozen=True)
class Declared:
    """What a backend says of its cache in the layout that is set. roles: of the dimensions of its
    shape; order: those from the slowest to the fastest in memory; block_dim: None if it does not say."""

    roles: tuple[str, ...]
    order: tuple[int, ...]
    block_dim: int | None

    @property
    def memory_roles(self) -> tuple[str, ...]:
        return tuple(self.roles[dim] for dim in self.order)


def declared(backend: type, cache_dtype: str = "auto") -> Declared:
    """Asks the backend.

    Raises:
        ValueError: its answers contradict each other.
    """
    name, shape = backend_name(backend), backend.get_kv_cache_shape
    get_roles = getattr(backend, "get_kv_cache_roles", None)
    roles = tuple(get_roles(cache_dtype)) if get_roles else None
    probed = _probe(backend, cache_dtype, name) if roles is None else roles
    try:
        order = tuple(backend.get_kv_cache_stride_order())
    except (AttributeError, NotImplementedError):
        order = tuple(range(len(probed)))
    if sorted(order) != list(range(len(probed))):
        raise ValueError(
            f"stride order {order} does not permute the {len(probed)} dimensions of its shape"
        )
    head_size, tokens = head_sizes([backend])[0], kernel_block_sizes([backend])[0]
    actual = tuple(shape(1009, tokens, 2, head_size, cache_dtype))
    if len(actual) != len(probed):
        raise ValueError(f"its roles are {probed}, but its shape is {actual}")
    block_dim = _block_dim(backend, tokens, head_size, cache_dtype)
    if block_dim is not None and probed[block_dim] != "block":
        raise ValueError(
            f"get_kv_cache_block_dim says {block_dim}, but dimension {probed.index('block')} of "
            f"{actual} counts the blocks"
        )
    return Declared(probed, order, block_dim)


def _probe(backend: type, cache_dtype: str, name: str) -> tuple[str, ...]:
    sizes = [one for one in _sizes(backend) if isinstance(one, int)]
    heads = list(getattr(backend, "get_supported_head_sizes", list)())
    shape = backend.get_kv_cache_shape
    return probe_roles(shape, cache_dtype, block_sizes=sizes, head_sizes=heads, name=name)


def _block_dim(backend: type, tokens: int, head_size: int, cache_dtype: str) -> int | None:
    ask = getattr(backend, "get_kv_cache_block_dim", None)
    return None if ask is None else ask(tokens, 2, head_size, cache_dtype)


def _sizes(backend: type) -> list:
    return list(getattr(backend, "get_supported_kernel_block_sizes", list)())


def takes_block_size(backend: type, tokens: int) -> bool:
    """Whether kernel blocks of so many tokens are declared."""
    sizes = _sizes(backend)
    bases = [getattr(size, "base", None) for size in sizes]
    return not sizes or any(
        tokens % base == 0 if base else tokens == size for size, base in zip(sizes, bases)
    )


def kernel_block_sizes(backends: list[type]) -> list[int]:
    """Tokens in a kernel block that all the backends declare, the usual ones first.

    Raises:
        ValueError: there is none.
    """
    more = [size for one in backends for size in _sizes(one) if isinstance(size, int)]
    more += [size.base for one in backends for size in _sizes(one) if hasattr(size, "base")]
    tried = dict.fromkeys([*KERNEL_BLOCK_SIZES, *more])
    found = [size for size in tried if all(takes_block_size(one, size) for one in backends)]
    if not found:
        names = " and ".join(backend_name(one) for one in backends)
        raise ValueError(f"{names} declare no kernel block size in common")
    return found


def head_sizes(backends: list[type]) -> list[int]:
    """Head sizes that all the backends take.

    Raises:
        ValueError: there is none.
    """
    found = [
        size
        for size in HEAD_SIZES
        if all(getattr(one, "supports_head_size", bool)(size) for one in backends)
    ]
    if not found:
        names = " and ".join(backend_name(one) for one in backends)
        raise ValueError(f"{names} take no head size in common")
    return found

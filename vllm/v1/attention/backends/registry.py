# SPDX-License-Identifier: Apache-2.0
"""Attention backends by name. Out-of-tree ones take a place here with `register_backend`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING

from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend


class _AttentionBackendEnumMeta(EnumMeta):
    def __getitem__(cls, name: str) -> AttentionBackendEnum:  # type: ignore[override]
        try:
            return super().__getitem__(name)
        except KeyError:
            raise ValueError(
                f"unknown attention backend {name!r}; known: {', '.join(cls.__members__)}"
            ) from None


class AttentionBackendEnum(Enum, metaclass=_AttentionBackendEnumMeta):
    """The value is the class's dotted name. CUSTOM is free for an out-of-tree backend."""

    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    ROCM_ATTN = "vllm.v1.attention.backends.rocm_attn.RocmAttentionBackend"
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    TORCH_ATTN = "vllm.v1.attention.backends.torch_attn.TorchAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname: bool = True) -> str:
        """Dotted name of the class (or its module): the one registered, else the built-in one.

        Raises:
            ValueError: CUSTOM, and nothing was registered for it.
        """
        path = _overrides.get(self.name, self.value)
        if path is None:
            raise ValueError(
                f"attention backend {self.name} has no class: register one with "
                "register_backend(AttentionBackendEnum.CUSTOM, 'package.module.Class')"
            )
        return path if include_classname else path.rsplit(".", 1)[0]

    def get_class(self) -> type[AttentionBackend]:
        """The class, imported now."""
        return resolve_obj_by_qualname(self.get_path())

    def is_overridden(self) -> bool:
        """Whether a class was registered in the built-in one's place."""
        return self.name in _overrides

    def clear_override(self) -> None:
        """Takes a registration back."""
        _overrides.pop(self.name, None)


_overrides: dict[str, str] = {}


def register_backend(
    backend: AttentionBackendEnum, class_path: str | None = None
) -> Callable[[type], type]:
    """Registers the class `class_path` for `backend`. Without a path: a decorator for the class.

    Example:
        @register_backend(AttentionBackendEnum.CUSTOM)
        class MyBackend(AttentionBackend): ...
    """
    if class_path is not None:
        _overrides[backend.name] = class_path
        return lambda cls: cls

    def register(cls: type) -> type:
        _overrides[backend.name] = f"{cls.__module__}.{cls.__qualname__}"
        return cls

    return register

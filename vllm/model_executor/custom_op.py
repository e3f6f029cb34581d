# SPDX-License-Identifier: Apache-2.0
"""Layers with one meaning and several implementations.

`forward_native` is plain torch: the reference, and what runs where nothing faster is written. A
device's implementation is found once, when the layer is made, by the platform's `device_type`, so
that no model and no layer asks which device it is on. An out-of-tree platform replaces whole
classes with `register_oot`, or overrides `forward_oot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from vllm.platforms import current_platform

T = TypeVar("T", bound=type)

op_registry: dict[str, type[CustomOp] | type[PluggableLayer]] = {}
# Class name of the layer that is replaced -> the class made in its place.
op_registry_oot: dict[str, type[CustomOp] | type[PluggableLayer]] = {}


def _register(name: str) -> Callable[[T], T]:
    def note(cls: T) -> T:
        if name in op_registry:
            raise ValueError(
                f"a layer called {name!r} is already registered: {op_registry[name].__qualname__}"
            )
        cls.name = name
        op_registry[name] = cls
        return cls

    return note


def _register_oot(cls: T | None, name: str | None) -> Callable[[T], T] | T:
    def note(replacement: T) -> T:
        replaced = name or replacement.__name__
        if replaced in op_registry_oot:
            raise ValueError(
                f"{replaced} is already replaced by {op_registry_oot[replaced].__qualname__}"
            )
        op_registry_oot[replaced] = replacement
        return replacement

    return note if cls is None else note(cls)


def _class_to_make(cls: type) -> type:
    replacement = op_registry_oot.get(cls.__name__, cls)
    if not issubclass(replacement, cls):  # its __init__ would not be called
        raise TypeError(
            f"{replacement.__qualname__} replaces {cls.__name__}; it must be a subclass of it"
        )
    return replacement


class PluggableLayer(nn.Module):
    """A layer that an out-of-tree platform may replace as a whole."""

    name: str

    def __new__(cls, *args: Any, **kwargs: Any) -> PluggableLayer:
        return super().__new__(_class_to_make(cls))

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Class decorator: make the layer known under `name`."""
        return _register(name)

    @classmethod
    def register_oot(cls, _decorated_layer_cls: T | None = None, name: str | None = None) -> Any:
        """Class decorator: use this class wherever the layer whose class is called `name` is
        made."""
        return _register_oot(_decorated_layer_cls, name)


class CustomOp(nn.Module):
    """A layer whose forward is chosen by device. Subclasses write `forward_native` and what they
    have."""

    name: str

    def __new__(cls, *args: Any, **kwargs: Any) -> CustomOp:
        return super().__new__(_class_to_make(cls))

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.dispatch_forward()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Plain torch, on any device."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """On an out-of-tree platform. Overridden there, or the forward of the device type it
        states."""
        return self._by_device_type()(*args, **kwargs)

    def dispatch_forward(self) -> Callable[..., Any]:
        """The forward for the current platform."""
        if type(self).forward_oot is not CustomOp.forward_oot and current_platform.is_out_of_tree():
            return self.forward_oot
        return self._by_device_type()

    def _by_device_type(self) -> Callable[..., Any]:
        by_device_type = {
            "cpu": self.forward_cpu,
            "cuda": self.forward_cuda,
            "xpu": self.forward_xpu,
        }
        return by_device_type.get(current_platform.device_type, self.forward_native)

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Class decorator: make the operation known under `name`."""
        return _register(name)

    @classmethod
    def register_oot(cls, _decorated_op_cls: T | None = None, name: str | None = None) -> Any:
        """Class decorator: use this class wherever the operation whose class is called `name` is
        made."""
        return _register_oot(_decorated_op_cls, name)

# SPDX-License-Identifier: Apache-2.0
"""The platform that is looked at, and the engine that it is looked at with."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import entry_points

from vllm_platform_kit import GROUP, PLATFORM_VARIABLE, other_platforms

PLUGIN_GROUPS = (GROUP, "vllm.general_plugins")


def choose(dotted_name: str) -> None:
    """Makes the platform that of this process and of its children. Comes before vLLM is imported.

    Other platforms that find their hardware here are left out, as vLLM takes only one.
    """
    os.environ[PLATFORM_VARIABLE] = dotted_name
    in_the_way = {name for name, other in other_platforms().items() if other != dotted_name}
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is None and not in_the_way:
        return
    if listed is None:
        names = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    else:
        names = {"vllm_platform_kit", *(name.strip() for name in listed.split(","))}
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - in_the_way))


@dataclass(frozen=True)
class Target:
    """name: the platform's dotted name."""

    name: str

    @property
    def platform_cls(self) -> type:
        """The class.

        Raises:
            ImportError: there is none of that name.
        """
        module, _, name = self.name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (AttributeError, ValueError) as error:
            raise ImportError(f"{self.name}: {error}") from error

    @property
    def base_cls(self) -> type:
        """The engine's base class of platforms."""
        from vllm.platforms import Platform

        return Platform

    @property
    def is_built_in(self) -> bool:
        """Whether the engine itself has it."""
        return self.platform_cls.__module__.startswith("vllm.")

    @property
    def engine(self) -> str:
        """The engine in words."""
        import vllm

        return f"vLLM {vllm.__version__} in {os.path.dirname(os.path.abspath(vllm.__file__))}"

    def own_classes(self) -> list[type]:
        """The platform's class and its bases that are none of the engine's, nearest first."""
        return [
            cls
            for cls in self.platform_cls.__mro__
            if cls is self.platform_cls or not cls.__module__.startswith(("vllm.", "builtins"))
        ]

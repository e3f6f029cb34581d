# SPDX-License-Identifier: Apache-2.0
"""The hooks of a platform: which are overridden, whether each override is one, what each answers."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from vllm_platform_kit.findings import Finding
from vllm_platform_kit.hook_notes import WITHOUT
from vllm_platform_kit.target import Target

REQUIRED = ("_enum", "device_name", "device_type")
# A name so close to a hook's is taken for a misspelt one.
CLOSE = 0.82


@dataclass(frozen=True)
class Hook:
    """One hook. owner: the class that its implementation is in; the engine's base: the default."""

    name: str
    owner: str
    is_default: bool
    without: str

    @property
    def line(self) -> str:
        if not self.is_default:
            return f"{self.name}: {self.owner}"
        return f"{self.name}: default{': ' if self.without else ''}{self.without}"


def hook_names(target: Target) -> list[str]:
    """Public methods and properties of the engine's base class."""
    kinds = (classmethod, staticmethod, property)
    return [
        name
        for name, value in vars(target.base_cls).items()
        if not name.startswith("_") and (isinstance(value, kinds) or inspect.isfunction(value))
    ]


def list_hooks(target: Target) -> list[Hook]:
    """Every hook of the engine, in its order."""
    hooks = []
    for name in hook_names(target):
        owner = next(cls for cls in target.platform_cls.__mro__ if name in vars(cls))
        is_default = owner is target.base_cls
        where = f"{owner.__module__}.{owner.__qualname__}"
        hooks.append(Hook(name, where, is_default, _without(target, name) if is_default else ""))
    return hooks


def _without(target: Target, name: str) -> str:
    """What happens without an override, else what the engine says that the hook is."""
    says = inspect.getdoc(vars(target.base_cls)[name]) or ""
    return WITHOUT.get(name) or says.partition("\n\n")[0].replace("\n", " ")


def check_attributes(target: Target) -> Iterator[Finding]:
    """What a class must have before anything is called."""
    cls = target.platform_cls
    for name in REQUIRED:
        if not hasattr(cls, name):
            yield Finding("PLATFORM_ATTRIBUTE", target.name, f"{name} is not set")
    kind = getattr(cls, "_enum", None)
    if kind is not None and kind.name != "OOT" and kind not in _built_in_kinds(target):
        yield Finding(
            "PLATFORM_ATTRIBUTE",
            target.name,
            f"_enum is {kind.name}: shared code takes it for the built-in platform; a platform from "
            "outside is PlatformEnum.OOT",
        )


def _built_in_kinds(target: Target) -> set:
    """Those of the engine's own platforms that this one is derived from."""
    theirs = set(target.platform_cls.__mro__) - set(target.own_classes())
    if target.is_built_in:
        theirs.add(target.platform_cls)
    return {vars(cls)["_enum"] for cls in theirs if "_enum" in vars(cls)}


def check_names(target: Target) -> Iterator[Finding]:
    """Methods that were meant to be hooks."""
    known = set(hook_names(target))
    for cls in target.own_classes():
        for name, value in vars(cls).items():
            is_method = isinstance(value, classmethod | staticmethod | property)
            is_method = is_method or inspect.isfunction(value)
            if not is_method or name.startswith("_") or name in known:
                continue
            close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
            if close:
                yield Finding(
                    "HOOK_UNKNOWN",
                    f"{cls.__qualname__}.{name}",
                    f"Platform has no such hook; {close[0]} was meant?",
                )


def own_additions(target: Target) -> list[str]:
    """Public methods of the platform that are no hooks of this engine."""
    known = set(hook_names(target))
    return sorted(
        name
        for cls in target.own_classes()
        for name, value in vars(cls).items()
        if not name.startswith("_") and name not in known and callable(getattr(cls, name))
    )


def check_overrides(target: Target) -> Iterator[Finding]:
    """Whether each override can be called as the base's method can."""
    for name in hook_names(target):
        base = vars(target.base_cls)[name]
        for cls in target.own_classes():
            if name not in vars(cls):
                continue
            subject = f"{cls.__qualname__}.{name}"
            override = vars(cls)[name]
            if _kind(base) != _kind(override):
                what = f"it is {_kind(override)}, in Platform it is {_kind(base)}"
                yield Finding("HOOK_KIND", subject, what)
            elif missing := _missing_parameters(base, override):
                what = f"it does not take {', '.join(missing)}, which vLLM passes"
                yield Finding("HOOK_SIGNATURE", subject, what)
            break


def _kind(value: object) -> str:
    if isinstance(value, property):
        return "a property"
    if isinstance(value, classmethod):
        return "a classmethod"
    return "a staticmethod" if isinstance(value, staticmethod) else "a method of instances"


def _missing_parameters(base: object, override: object) -> list[str]:
    """Parameters of the base's that the override does not take; and its own that nobody passes."""
    if isinstance(base, property):
        return []
    theirs = inspect.signature(base.__func__ if hasattr(base, "__func__") else base).parameters
    mine = inspect.signature(
        override.__func__ if hasattr(override, "__func__") else override
    ).parameters
    kinds = {parameter.kind for parameter in mine.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = list(theirs.values())
    if isinstance(base, classmethod) or inspect.isfunction(base):
        wanted, mine = wanted[1:], dict(list(mine.items())[1:])
    return [p.name for p in wanted if p.name not in mine and p.kind not in variadic]


@dataclass(frozen=True)
class Question:
    """A hook that may be asked at any time: arguments and a test of its answer, in words."""

    name: str
    arguments: tuple
    expected: str
    accepts: object


def _questions() -> list[Question]:
    import torch

    def is_list_of(kind: type):
        return lambda value: (
            isinstance(value, list | tuple)
            and value != []
            and all(isinstance(one, kind) for one in value)
        )

    def is_memory(value: object) -> bool:
        return len(value) == 2 and 0 <= value[0] <= value[1]

    boolean = ("True or False", lambda value: isinstance(value, bool))
    text = ("a text", lambda value: isinstance(value, str) and value != "")
    mapping = ("a dict", lambda value: isinstance(value, dict))
    length = (
        "a number of tokens, at most those asked for",
        lambda value: isinstance(value, int) and 0 < value <= 4096,
    )
    dtypes = ("a list of torch dtypes, the preferred one first", is_list_of(torch.dtype))
    device = ("a torch.device", lambda value: isinstance(value, torch.device))
    return [
        Question("supported_dtypes", (), *dtypes),
        Question("support_hybrid_kv_cache", (), *boolean),
        Question("support_static_graph_mode", (), *boolean),
        Question("is_pin_memory_available", (), *boolean),
        Question("check_max_model_len", (4096,), *length),
        Question("get_device_name", (), *text),
        Question("get_device_communicator_cls", (), *text),
        Question("set_additional_forward_context", (), *mapping),
        Question("get_torch_device", (0,), *device),
        Question("mem_get_info", (), "(free, total) bytes", is_memory),
        Question("get_nixl_supported_devices", (), *mapping),
    ]


def check_answers(target: Target) -> Iterator[Finding]:
    """What the hooks answer that may be asked without a model. Defaults are the engine's to answer for,
    and one that refuses is allowed to."""
    import torch  # noqa: F401  the answers are torch's

    cls = target.platform_cls
    platform, hooks = cls(), {hook.name: hook for hook in list_hooks(target)}
    for question in _questions():
        hook = hooks.get(question.name)
        if hook is None or hook.is_default:
            continue
        subject = f"{cls.__qualname__}.{question.name}"
        try:
            answer = getattr(platform, question.name)
            if callable(answer):
                answer = answer(*question.arguments)
            right = question.accepts(answer)
        except Exception as error:
            yield Finding("HOOK_RAISES", subject, f"{type(error).__name__}: {error}")
            continue
        if not right:
            yield Finding("HOOK_VALUE", subject, f"{answer!r} is not {question.expected}")
    yield from _check_device_index(target)


def _check_device_index(target: Target) -> Iterator[Finding]:
    """Of the devices that are visible, number 0 and number 1 are the first and the second listed."""
    cls = target.platform_cls
    variable = cls.device_control_env_var
    with mock.patch.dict(os.environ, {variable: "5,3"}):
        for number, expected in enumerate((5, 3)):
            try:
                found = cls.device_id_to_physical_device_id(number)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found != expected:
                yield Finding(
                    "HOOK_DEVICE_INDEX",
                    f"{cls.__qualname__}.device_id_to_physical_device_id",
                    f"with {variable}=5,3 device {number} is {expected}, not {found}",
                )

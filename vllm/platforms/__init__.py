# SPDX-License-Identifier: Apache-2.0
"""Finds the platform of this process: `from vllm.platforms import current_platform`.

It is resolved on first use, never when `vllm` or this package is imported. Out-of-tree platforms
(entry-point group `vllm.platform_plugins`) win over the built-in ones; a machine without an
accelerator gets the CPU platform. Vendor libraries are touched only while resolving, and a broken
one is a debug line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.plugins import (
    PLATFORM_PLUGINS_GROUP,
    PluginError,
    describe_failure,
    report_failure,
    scan_plugins,
)
from vllm.utils.import_utils import resolve_obj_by_qualname

from .interface import CpuArchEnum, DeviceCapability, Platform, PlatformEnum
from .torch_build import torch_build

logger = logging.getLogger(__name__)


def cuda_platform_plugin() -> str | None:
    """The CUDA platform, if torch was built for CUDA and an NVIDIA GPU is there."""
    if torch_build().cuda is None or _hides_all("CUDA_VISIBLE_DEVICES"):
        return None
    found = _nvml_sees_a_gpu() or _torch_sees("cuda")
    return "vllm.platforms.cuda.CudaPlatform" if found else None


def rocm_platform_plugin() -> str | None:
    """The ROCm platform, if torch was built for HIP and an AMD GPU is there."""
    if torch_build().hip is None or _hides_all("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        return None
    found = _amdsmi_sees_a_gpu() or _torch_sees("cuda")
    return "vllm.platforms.rocm.RocmPlatform" if found else None


def xpu_platform_plugin() -> str | None:
    """The XPU platform, if torch was built for XPU and an Intel GPU is there."""
    if torch_build().xpu is None:
        return None
    return "vllm.platforms.xpu.XPUPlatform" if _torch_sees("xpu") else None


def cpu_platform_plugin() -> str | None:
    """The CPU platform: always there."""
    return "vllm.platforms.cpu.CpuPlatform"


builtin_platform_plugins: dict[str, Callable[[], str | None]] = {
    "cuda": cuda_platform_plugin,
    "rocm": rocm_platform_plugin,
    "xpu": xpu_platform_plugin,
    "cpu": cpu_platform_plugin,
}


def _hides_all(*variables: str) -> bool:
    """Whether the environment makes no device visible; NVML and amdsmi do not heed it."""
    return any(os.environ.get(name, "unset").strip() in ("", "-1") for name in variables)


def _nvml_sees_a_gpu() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return pynvml.nvmlDeviceGetCount() > 0
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # absent, broken, or of another version than the driver
        logger.debug("NVML is not usable: %s: %s", type(error).__name__, error)
        return False


def _amdsmi_sees_a_gpu() -> bool:
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        try:
            return len(amdsmi.amdsmi_get_processor_handles()) > 0
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception as error:  # absent, broken, or of another version than the driver
        logger.debug("amdsmi is not usable: %s: %s", type(error).__name__, error)
        return False


def _torch_sees(device_type: str) -> bool:
    try:
        import torch

        return bool(torch.get_device_module(device_type).is_available())
    except Exception as error:  # a driver that torch cannot work with
        logger.debug("torch.%s is not usable: %s: %s", device_type, type(error).__name__, error)
        return False


def resolve_current_platform_cls_qualname() -> str:
    """The dotted name of this process's Platform class.

    Raises:
        PluginError: the platform that the user asked for failed or is absent.
        RuntimeError: more than one out-of-tree platform is active.
    """
    asked = envs.VLLM_TARGET_DEVICE.lower()
    active = _active_plugins(asked)
    for name, qualname in active.items():
        if name.lower() == asked:
            return qualname
    if len(active) > 1:
        raise RuntimeError(
            f"more than one platform plugin is active: {', '.join(sorted(active))}. "
            "Set VLLM_PLUGINS to the names of the plugins to load, with only one of these in it"
        )
    if active:
        (name, qualname), *_ = active.items()
        if asked in builtin_platform_plugins:
            logger.warning(
                "VLLM_TARGET_DEVICE=%s has no effect: platform plugin %r is active and wins over "
                "the built-in platforms; set VLLM_PLUGINS without it to leave it out",
                asked,
                name,
            )
        logger.info("Platform plugin %s is active: %s", name, qualname)
        return qualname
    return _builtin(asked)


def _active_plugins(asked: str) -> dict[str, str]:
    """Name -> dotted class name of each out-of-tree platform whose hardware is there."""
    scan = scan_plugins(PLATFORM_PLUGINS_GROUP)
    failed = dict(scan.failed)
    active: dict[str, str] = {}
    for name, register in scan.loaded.items():
        try:
            qualname = register()
            if not (qualname is None or isinstance(qualname, str)):
                raise TypeError(f"it returned {qualname!r}, not a dotted class name or None")
        except Exception as error:  # a plugin may raise anything
            failed[name] = error
            continue
        if qualname is not None:
            active[name] = qualname
        elif name.lower() == asked:
            raise PluginError(
                f"VLLM_TARGET_DEVICE={asked} asks for a platform plugin that finds no such hardware"
            )
        else:
            logger.debug("platform plugin %s reports no such hardware", name)
    for name, error in failed.items():
        if name.lower() == asked:
            why = describe_failure(name, PLATFORM_PLUGINS_GROUP, error)
            raise PluginError(f"{why} (VLLM_TARGET_DEVICE asks for it)") from error
        report_failure(name, PLATFORM_PLUGINS_GROUP, error)
    return active


def _builtin(asked: str) -> str:
    """The built-in platform asked for, else the first whose hardware is there."""
    if asked in builtin_platform_plugins:
        qualname = builtin_platform_plugins[asked]()
        if qualname is None:
            raise PluginError(
                f"VLLM_TARGET_DEVICE={asked} asks for a platform that is not usable here: torch "
                f"{torch_build().version} was built without it, or no such device is there. "
                "Unset it to have the platform found; VLLM_LOGGING_LEVEL=DEBUG shows what was tried"
            )
        return qualname
    if asked not in ("", "auto", "empty"):  # `empty` is what some images are built with
        raise PluginError(
            f"VLLM_TARGET_DEVICE={asked} names no platform; built in: "
            f"{', '.join(builtin_platform_plugins)}, or the name of an installed platform plugin"
        )
    found = (name for name in map(_try_builtin, builtin_platform_plugins) if name is not None)
    return next(found)


def _try_builtin(name: str) -> str | None:
    qualname = builtin_platform_plugins[name]()
    logger.debug("built-in platform %s: %s", name, "found" if qualname else "not here")
    return qualname


_resolve_lock = threading.RLock()
_resolving = False


def _resolve() -> Platform:
    global _resolving
    with _resolve_lock:
        if "current_platform" in globals():  # another thread was faster
            return globals()["current_platform"]
        if _resolving:
            raise RuntimeError(
                "vllm.platforms.current_platform was used while it is being resolved: a platform "
                "plugin's register() or its module must import what needs it inside functions"
            )
        _resolving = True
        try:
            platform_cls = _load(resolve_current_platform_cls_qualname())
            return platform_cls()
        finally:
            _resolving = False


def use_platform(platform: Platform) -> None:
    """Makes `platform` this process's, while no other module holds another one.

    Raises:
        RuntimeError: it is too late, one does.
    """
    with _resolve_lock:
        old = globals().get("current_platform")
        modules = [m for name, m in list(sys.modules.items()) if name != __name__]
        holders = [m.__name__ for m in modules if old and vars(m).get("current_platform") is old]
        if holders:
            raise RuntimeError(
                f"this process runs on {old.device_name} already: {', '.join(holders)} was imported"
            )
        globals()["current_platform"] = platform


def _load(qualname: str) -> type[Platform]:
    try:
        platform_cls = resolve_obj_by_qualname(qualname)
    except ImportError as error:
        raise PluginError(f"the platform class {qualname} cannot be imported: {error}") from error
    if not (isinstance(platform_cls, type) and issubclass(platform_cls, Platform)):
        raise PluginError(f"{qualname} is not a subclass of vllm.platforms.Platform")
    required = ("_enum", "device_name", "device_type")
    missing = [name for name in required if not hasattr(platform_cls, name)]
    if missing:
        raise PluginError(f"the platform class {qualname} must set {', '.join(missing)}")
    return platform_cls


if TYPE_CHECKING:
    current_platform: Platform


def __getattr__(name: str) -> Any:
    if name != "current_platform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = resolved = _resolve()
    return resolved


__all__ = [
    "CpuArchEnum",
    "DeviceCapability",
    "Platform",
    "PlatformEnum",
    "current_platform",
    "use_platform",
]

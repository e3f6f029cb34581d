# SPDX-License-Identifier: Apache-2.0
"""What a report of a fault should hold: system, libraries, devices, settings. Each part says why it
is missing rather than failing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version

import vllm
from vllm.plugins import ALL_PLUGIN_GROUPS
from vllm.version import __version__

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numpy",
    "numba", "triton", "pydantic", "fastapi", "uvicorn", "pyzmq", "msgspec", "nixl", "ray",
)  # fmt: skip
# Their values are nobody's business.
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PREFIXES = ("VLLM_", "OMP_", "MKL_", "NUMBA_", "CUDA_", "HIP_", "ROCR_", "TORCH", "HF_", "LD_")
Rows = list[tuple[str, str]]


def get_env_info() -> str:
    """All of it as text."""
    parts: dict[str, Callable[[], Rows]] = {
        "System": _system,
        "CPU": _cpu,
        "Libraries": _libraries,
        "PyTorch": _torch,
        "vLLM": _vllm,
        "Environment": _environment,
    }
    return "\n\n".join(_part(title, collect) for title, collect in parts.items())


def _part(title: str, collect: Callable[[], Rows]) -> str:
    try:
        rows = collect()
    except Exception as error:  # a broken installation is what this is asked about
        rows = [("not available", f"{type(error).__name__}: {error}")]
    lines = [f"{name:<28} {value}" for name, value in rows]
    return "\n".join([f"--- {title} ---", *(lines or ["(none)"])])


def _system() -> Rows:
    release = platform.freedesktop_os_release() if sys.platform == "linux" else {}
    return [
        ("OS", release.get("PRETTY_NAME", platform.platform())),
        ("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("libc", "-".join(platform.libc_ver())),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
    ]


def _cpu() -> Rows:
    import psutil

    memory = psutil.virtual_memory()
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "").split()
    wanted = [f for f in flags if f.startswith(("avx", "amx", "fma", "f16c"))]
    return [
        ("model", names[0] if names else platform.processor() or "unknown"),
        ("cores", f"{psutil.cpu_count(logical=False)} ({psutil.cpu_count()} threads, "
                  f"{len(os.sched_getaffinity(0))} for this process)"),
        ("instructions", " ".join(wanted) or "unknown"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free"),
    ]  # fmt: skip


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _libraries() -> Rows:
    rows = []
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _torch() -> Rows:
    import torch

    from vllm.platforms import current_platform

    rows = [
        ("threads", str(torch.get_num_threads())),
        ("CPU capability", torch.backends.cpu.get_cpu_capability()),
        ("accelerator", str(torch.accelerator.current_accelerator())),
        ("devices", str(torch.accelerator.device_count())),
    ]
    for index in range(torch.accelerator.device_count()):
        rows.append((f"device {index}", current_platform.get_device_name(index)))
    return rows


def _vllm() -> Rows:
    from vllm.platforms import current_platform

    plugins = [
        f"{entry.name} ({group})"
        for group in ALL_PLUGIN_GROUPS
        for entry in entry_points(group=group)
    ]
    return [
        ("version", __version__),
        ("where", os.path.dirname(vllm.__file__)),
        ("platform", f"{type(current_platform).__name__} ({current_platform.device_name})"),
        ("dtypes", ", ".join(current_platform.supported_dtype_names)),
        ("plugins", ", ".join(plugins) or "none"),
    ]


def _environment() -> Rows:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    return [
        (name, "(set)" if any(word in name for word in _SECRETS) else os.environ[name])
        for name in names
    ]

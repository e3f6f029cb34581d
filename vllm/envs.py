# SPDX-License-Identifier: Apache-2.0
"""Environment variables, read when asked for: `envs.VLLM_CACHE_ROOT`. One table says them all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    VLLM_CACHE_ROOT: str
    VLLM_CONFIGURE_LOGGING: bool
    VLLM_LOGGING_LEVEL: str
    VLLM_LOGGING_PREFIX: str
    VLLM_LOG_STATS_INTERVAL: float
    VLLM_PLUGINS: list[str] | None
    VLLM_TARGET_DEVICE: str
    VLLM_CPU_KVCACHE_SPACE: float | None
    VLLM_CPU_OMP_THREADS_BIND: str
    VLLM_KV_CACHE_LAYOUT: str | None
    VLLM_USE_V2_MODEL_RUNNER: bool | None
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_API_KEY: str | None
    VLLM_DEBUG_CHECK_INTEGRITY: bool
    VLLM_COMPUTE_NANS_IN_LOGITS: bool
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH: bool
    VLLM_SERVER_DEV_MODE: bool
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE: float
    VLLM_MAX_N_SEQUENCES: int
    VLLM_IMAGE_FETCH_TIMEOUT: float
    VLLM_NIXL_SIDE_CHANNEL_HOST: str
    VLLM_NIXL_SIDE_CHANNEL_PORT: int


def _flag(name: str, default: str = "0") -> bool:
    value = os.getenv(name, default).strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{name}={value!r} is not a flag; set it to 0 or 1")


def _number(name: str, default: float | None) -> float | None:
    value = os.getenv(name)
    if value is None or value == "":
        return default
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a number") from None


def _names(name: str) -> list[str] | None:
    value = os.getenv(name)
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _cache_root() -> str:
    base = os.getenv("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.expanduser(os.getenv("VLLM_CACHE_ROOT") or os.path.join(base, "vllm"))


environment_variables: dict[str, Callable[[], Any]] = {
    # Where compiled kernels, converted tokenizers and other things made once are kept.
    "VLLM_CACHE_ROOT": _cache_root,
    # 0: leave the `vllm` logger to the program that imports us.
    "VLLM_CONFIGURE_LOGGING": lambda: _flag("VLLM_CONFIGURE_LOGGING", "1"),
    "VLLM_LOGGING_LEVEL": lambda: os.getenv("VLLM_LOGGING_LEVEL", "INFO").upper(),
    "VLLM_LOGGING_PREFIX": lambda: os.getenv("VLLM_LOGGING_PREFIX", ""),
    # Seconds between two lines of engine statistics.
    "VLLM_LOG_STATS_INTERVAL": lambda: _number("VLLM_LOG_STATS_INTERVAL", 10.0),
    # Names of the plugins to load, separated by commas; unset: all.
    "VLLM_PLUGINS": lambda: _names("VLLM_PLUGINS"),
    # Ask for a built-in platform by name (cpu, cuda, rocm, xpu); empty: find out.
    "VLLM_TARGET_DEVICE": lambda: os.getenv("VLLM_TARGET_DEVICE", "").lower(),
    # GiB of KV cache on the CPU; unset: a modest share of free memory.
    "VLLM_CPU_KVCACHE_SPACE": lambda: _number("VLLM_CPU_KVCACHE_SPACE", None),
    # auto, nobind, or a list of cores such as 0-3,8.
    "VLLM_CPU_OMP_THREADS_BIND": lambda: os.getenv("VLLM_CPU_OMP_THREADS_BIND", "auto"),
    # NHD or HND: how blocks are laid out in backends that do either; unset: NHD.
    "VLLM_KV_CACHE_LAYOUT": lambda: os.getenv("VLLM_KV_CACHE_LAYOUT"),
    # There is only the V2 runner; 0 is refused at start.
    "VLLM_USE_V2_MODEL_RUNNER": lambda: (
        _flag("VLLM_USE_V2_MODEL_RUNNER") if os.getenv("VLLM_USE_V2_MODEL_RUNNER") else None
    ),
    # 1: `LLM` too runs its engine in a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": lambda: _flag("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    "VLLM_API_KEY": lambda: os.getenv("VLLM_API_KEY"),
    # 1: the scheduler checks its block bookkeeping whenever it is idle.
    "VLLM_DEBUG_CHECK_INTEGRITY": lambda: _flag("VLLM_DEBUG_CHECK_INTEGRITY"),
    # 1: count NaN logits for each request.
    "VLLM_COMPUTE_NANS_IN_LOGITS": lambda: _flag("VLLM_COMPUTE_NANS_IN_LOGITS"),
    # 1: the HTTP server stays up (and unhealthy) when its engine has died.
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": lambda: _flag("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
    # 1: the HTTP server has routes that only its owner should reach, such as /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": lambda: _flag("VLLM_SERVER_DEV_MODE"),
    # Seconds that the HTTP server keeps a connection on which nothing happens.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": lambda: _number("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5.0),
    # Most completions (n) of one prompt.
    "VLLM_MAX_N_SEQUENCES": lambda: int(_number("VLLM_MAX_N_SEQUENCES", 1024)),
    # Seconds that fetching an image by its URL may take, redirects and all.
    "VLLM_IMAGE_FETCH_TIMEOUT": lambda: _number("VLLM_IMAGE_FETCH_TIMEOUT", 5.0),
    # Where NixlConnector of this engine listens for peers; port 0: any free one.
    "VLLM_NIXL_SIDE_CHANNEL_HOST": lambda: os.getenv("VLLM_NIXL_SIDE_CHANNEL_HOST") or "localhost",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": lambda: int(_number("VLLM_NIXL_SIDE_CHANNEL_PORT", 5600)),
}


def __getattr__(name: str) -> Any:
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(environment_variables)


def is_set(name: str) -> bool:
    """Whether the user set variable `name`.

    Raises:
        AttributeError: it is not one of ours.
    """
    if name not in environment_variables:
        raise AttributeError(f"{name} is no vLLM environment variable")
    return name in os.environ


def unknown_variables() -> list[str]:
    """VLLM_* variables that are set and have no effect here."""
    names = (name for name in os.environ if name.startswith("VLLM_"))
    return sorted(name for name in names if name not in environment_variables)


def set_for_children(name: str, value: str) -> None:
    """Sets variable `name` here and in every process started from here."""
    if name not in environment_variables:
        raise AttributeError(f"{name} is no vLLM environment variable")
    os.environ[name] = value

# SPDX-License-Identifier: Apache-2.0
"""Guards the KV caches of an installed vLLM.

`register` is called by vLLM in each of its processes, as one of its general plugins. It wraps the
first method of `HOOKS`, which every worker of every device goes through once: when that has made and
bound the caches, the real tensors are looked at. The second is wrapped only while the first runs, and
only where a KV connector is configured. Nothing runs per step.
"""

import contextlib
import functools
import logging
import os
import sys
import time

MODES = ("log", "warn", "refuse", "off")
HOOKS = (
    "vllm.v1.worker.worker_base.WorkerWrapperBase.initialize_from_config",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.__init__",
)
# Of vLLM, first and last, as major.minor.
KNOWN_RELEASES = ((0, 24), (0, 33))

logger = logging.getLogger("vllm.kv_guard")


def mode() -> str:
    """`VLLM_KV_GUARD`: log (one line), warn (a warning if caches collide, the default), refuse (the
    start fails), off.

    Raises:
        ValueError: it is none of them.
    """
    value = os.environ.get("VLLM_KV_GUARD", "warn").lower()
    if value not in MODES:
        raise ValueError(f"VLLM_KV_GUARD={value}: one of {', '.join(MODES)}")
    return value


def register() -> None:
    """Wraps the first of the hooks; once in a process, however often it is called."""
    if mode() == "off":
        return
    start = time.thread_time()
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        original = WorkerWrapperBase.initialize_from_config
    except (ImportError, AttributeError) as error:
        logger.warning("KV guard: off, this vLLM has no %s (%s)", HOOKS[0], error)
        return
    if getattr(original, "is_kv_guard", False):
        return
    hooking = []

    @functools.wraps(original)
    def initialize_from_config(self, kv_cache_configs, *args, **kwargs):
        start = time.thread_time()
        with contextlib.ExitStack() as stack:
            registrations = _watched(stack, self)
            loading = time.thread_time() - start
            result = original(self, kv_cache_configs, *args, **kwargs)
        _guard(lambda: _examined(self, kv_cache_configs, registrations), sum(hooking) + loading)
        return result

    initialize_from_config.is_kv_guard = True
    WorkerWrapperBase.initialize_from_config = initialize_from_config
    _vllm_logger().debug("KV guard: hooked %s", HOOKS[0])
    hooking.append(time.thread_time() - start)


def _watched(stack, wrapper) -> list:
    """What connectors are handed until the stack is left; a text instead where that can't be seen."""
    try:
        from vllm_kv_guard.connectors import watch

        return stack.enter_context(watch(getattr(wrapper.worker, "vllm_config", None)))
    except Exception as error:  # A guard must not take down what it guards.
        return [f"connectors ({type(error).__name__}: {error})"]


def _examined(wrapper, kv_cache_configs, registrations):
    from vllm_kv_guard.findings import examine

    rank = getattr(wrapper, "global_rank", 0) or 0
    return examine(wrapper.worker, kv_cache_configs[rank], registrations)


def _guard(look, spent: float) -> None:
    """Says or does what the mode asks for. `look` makes the report; `spent`: seconds of its own before
    that; the line has them all. It is processor time: how long others kept it waiting is not its own.

    Raises:
        RuntimeError: caches collide, and the mode is refuse.
    """
    start = time.thread_time()
    try:
        report = look()
        report.seconds = time.thread_time() - start + spent
        line, is_sound, collides = report.line(), report.is_sound, bool(report.conflicts)
    except Exception as error:  # A guard must not take down what it guards.
        line, is_sound, collides = f"not looked at: {type(error).__name__}: {error}", False, False
    text = f"KV guard: {line}{_release_note()}"
    # vLLM configures its own loggers; a plugin's would be silent below a warning.
    if is_sound or mode() == "log":
        _vllm_logger().info(text)
        return
    if mode() == "refuse" and collides:
        raise RuntimeError(f"{text}. VLLM_KV_GUARD=warn starts all the same")
    _vllm_logger().warning(text)


def _vllm_logger():
    try:
        from vllm.logger import init_logger

        return init_logger("vllm.kv_guard")
    except Exception:
        return logger


def _release_note() -> str:
    version = getattr(sys.modules.get("vllm"), "__version__", "unknown")
    try:
        release = tuple(int(part) for part in version.split(".")[:2])
    except (ValueError, AttributeError):
        release = (0, 0)
    if KNOWN_RELEASES[0] <= release <= KNOWN_RELEASES[1]:
        return ""
    return f" (vLLM {version} is not known to this guard; what it says may be wrong)"

# SPDX-License-Identifier: Apache-2.0
"""Plugins: functions that installed packages offer through entry points.

`VLLM_PLUGINS`, a comma-separated list of entry-point names, limits which are loaded (unset: all;
empty: none). A plugin that fails is warned about by name and cause and left out; one that the
user asked for by name is an error instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm import envs

logger = logging.getLogger(__name__)

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
IO_PROCESSOR_PLUGINS_GROUP = "vllm.io_processor_plugins"
PLATFORM_PLUGINS_GROUP = "vllm.platform_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"
ENDPOINT_PLUGINS_GROUP = "vllm.endpoint_plugins"
LOGITSPROCS_GROUP = "vllm.logits_processors"

ALL_PLUGIN_GROUPS = (
    DEFAULT_PLUGINS_GROUP,
    IO_PROCESSOR_PLUGINS_GROUP,
    PLATFORM_PLUGINS_GROUP,
    STAT_LOGGER_PLUGINS_GROUP,
    ENDPOINT_PLUGINS_GROUP,
    LOGITSPROCS_GROUP,
)

plugins_loaded = False
_load_lock = threading.RLock()


class PluginError(RuntimeError):
    """A plugin that the user asked for by name could not be loaded or failed."""


@dataclass
class PluginScan:
    """What one group offers: what could be loaded, and why the rest could not."""

    loaded: dict[str, Callable[[], Any]] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)


def is_asked_for(name: str) -> bool:
    """Whether the user named plugin `name` in VLLM_PLUGINS."""
    return name in (envs.VLLM_PLUGINS or [])


def describe_failure(name: str, group: str, cause: Exception) -> str:
    """One line that says which plugin failed, why, and how to go on without it."""
    return (
        f"plugin {name!r} of group {group} failed: {type(cause).__name__}: {cause}. "
        "Fix or uninstall it, or list the plugins to load in VLLM_PLUGINS (empty: none)"
    )


def scan_plugins(group: str) -> PluginScan:
    """Imports the entry points of `group` that VLLM_PLUGINS admits; calls none of them.

    Endpoint plugins add HTTP routes, so they are admitted only when named.
    """
    scan = PluginScan()
    for entry in _admitted(group):
        logger.debug("loading plugin %s = %s of group %s", entry.name, entry.value, group)
        try:
            scan.loaded[entry.name] = entry.load()
        except Exception as error:  # a plugin's import may raise anything
            scan.failed[entry.name] = error
    return scan


def load_plugins_by_group(group: str) -> dict[str, Callable[[], Any]]:
    """The plugins of `group` by name, imported but not called.

    Raises:
        PluginError: a plugin named in VLLM_PLUGINS could not be imported. Others are warned about.
    """
    scan = scan_plugins(group)
    for name, error in scan.failed.items():
        report_failure(name, group, error)
    return scan.loaded


def report_failure(name: str, group: str, cause: Exception) -> None:
    """Warns that a plugin failed.

    Raises:
        PluginError: it was asked for by name.
    """
    if is_asked_for(name):
        why = describe_failure(name, group, cause)
        raise PluginError(f"{why} (VLLM_PLUGINS asks for it)") from cause
    logger.warning("%s", describe_failure(name, group, cause))


def load_general_plugins() -> None:
    """Calls every plugin of `vllm.general_plugins`, once in each process.

    Re-entrant: a plugin that calls this again, directly or through what it imports, returns at
    once; another thread waits until all plugins were called.

    Raises:
        PluginError: a plugin named in VLLM_PLUGINS failed. Others are warned about.
    """
    global plugins_loaded
    with _load_lock:
        if plugins_loaded:
            return
        plugins_loaded = True
        _warn_of_unknown_names()
        for name, function in load_plugins_by_group(DEFAULT_PLUGINS_GROUP).items():
            try:
                function()
            except Exception as error:  # a plugin may raise anything
                report_failure(name, DEFAULT_PLUGINS_GROUP, error)


def _admitted(group: str) -> list[EntryPoint]:
    allowed = envs.VLLM_PLUGINS
    if allowed is None and group == ENDPOINT_PLUGINS_GROUP:
        allowed = []
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if allowed is not None and entry.name not in allowed:
            continue
        # One distribution seen twice on sys.path offers the same entry twice.
        first = found.setdefault(entry.name, entry)
        if first.value != entry.value:
            logger.warning(
                "two plugins of group %s are called %r: %s is used, %s is not",
                group,
                entry.name,
                first.value,
                entry.value,
            )
    return list(found.values())


def _warn_of_unknown_names() -> None:
    known = {entry.name for group in ALL_PLUGIN_GROUPS for entry in entry_points(group=group)}
    unknown = sorted(set(envs.VLLM_PLUGINS or []) - known)
    if unknown:
        logger.warning(
            "VLLM_PLUGINS names %s, but no installed package offers such a plugin; installed: %s",
            ", ".join(unknown),
            ", ".join(sorted(known)) or "none",
        )

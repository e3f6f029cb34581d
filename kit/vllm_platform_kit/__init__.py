# SPDX-License-Identifier: Apache-2.0
"""A conformance suite for vLLM platforms: `pytest --vllm-platform my_pkg.MyPlatform`.

`platform` is a plugin of the group `vllm.platform_plugins`: in every process of a run it names the
platform that is looked at, so that a package needs no entry point of its own for that. In processes
of anybody else it names none.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

PLATFORM_VARIABLE = "VLLM_KIT_PLATFORM"
GROUP = "vllm.platform_plugins"


def platform() -> str | None:
    """The entry point: the dotted name of the platform that is looked at, where no other plugin
    brings it."""
    wanted = os.environ.get(PLATFORM_VARIABLE)
    return wanted if wanted and wanted not in other_platforms().values() else None


def other_platforms() -> dict[str, str]:
    """Name -> platform of the other plugins that find their hardware here. One that is broken is
    vLLM's to report."""
    found = {}
    for entry in entry_points(group=GROUP):
        if entry.value.partition(":")[0] == __name__:
            continue
        try:
            platform_cls = entry.load()()
        except Exception:
            continue
        if platform_cls:
            found[entry.name] = platform_cls
    return found

# SPDX-License-Identifier: Apache-2.0
"""Host memory that this process may use, cgroup limits heeded. Imports no torch.

A container's limit is not in /proc/meminfo: it stands in the memory controller of its cgroup (v1 or
v2), and any ancestor may set a tighter one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GiB = 1 << 30
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory: in all, and not in use. A cgroup's limit counts as the size."""

    total_bytes: int
    available_bytes: int
    limited_by: str | None = None
    """The cgroup folder whose limit leaves the least, or None."""


@dataclass(frozen=True)
class _CgroupFiles:
    limit: str
    usage: str
    reclaimable: str


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def host_memory(proc: Path = Path("/proc")) -> HostMemory:
    """What is left: the machine's available memory, or a cgroup's limit less its usage if less.

    Page cache that the kernel can drop does not count as used.

    Args:
        proc: the proc file system.
    """
    machine = psutil.virtual_memory()
    result = HostMemory(machine.total, machine.available)
    for folder, files in _memory_cgroups(proc):
        limit = _read_int(folder / files.limit)
        if limit is None or limit >= min(_NO_LIMIT_BYTES, machine.total):
            continue
        used = (_read_int(folder / files.usage) or 0) - _read_stat(folder, files.reclaimable)
        available = max(0, limit - max(0, used))
        tighter = available < result.available_bytes
        result = HostMemory(
            min(limit, result.total_bytes),
            min(available, result.available_bytes),
            str(folder) if tighter else result.limited_by,
        )
    return result


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """This process's cgroup with a memory controller, then each ancestor that can be seen."""
    for path, controllers in _own_cgroups(proc):
        if controllers == "":
            kind, files = "cgroup2", _V2
        elif "memory" in controllers.split(","):
            kind, files = "cgroup", _V1
        else:
            continue
        for mount_root, mount_point in _mounts(proc, kind):
            for folder in _ancestors(path, mount_root, mount_point):
                yield folder, files


def _own_cgroups(proc: Path) -> list[tuple[str, str]]:
    """(path, controllers) from lines such as `4:memory:/docker/abc`; no controllers: version 2."""
    lines = (line.split(":", 2) for line in _read_lines(proc / "self" / "cgroup"))
    return [(parts[2], parts[1]) for parts in lines if len(parts) == 3]


def _mounts(proc: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """(root, mount point) of mounted cgroup file systems of that kind; fields as in proc(5)."""
    for line in _read_lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, (fs_type, _, options) = left.split(), right.split(" ", 2)
        wanted = kind == "cgroup2" or "memory" in options.split(",")
        if fs_type == kind and wanted:
            yield fields[3], Path(fields[4])


def _ancestors(path: str, mount_root: str, mount_point: Path) -> Iterator[Path]:
    """The folders from the process's cgroup up to the mount point.

    Inside a container the path may be the host's and not be visible: then the mount point is ours.
    """
    inside = path.removeprefix(mount_root) if mount_root != "/" else path
    folder = mount_point / inside.lstrip("/")
    if not folder.is_dir() or ".." in folder.parts:
        folder = mount_point
    while True:
        yield folder
        if folder == mount_point:
            return
        folder = folder.parent


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_int(path: Path) -> int | None:
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _read_stat(folder: Path, key: str) -> int:
    fields = (line.split() for line in _read_lines(folder / "memory.stat"))
    return next((int(f[1]) for f in fields if len(f) == 2 and f[0] == key), 0)

# SPDX-License-Identifier: Apache-2.0
"""Host memory under cgroup limits: what a container may use is not what the machine has."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from vllm.utils.mem_utils import GiB, host_memory

CGROUP_V1_MOUNT = "35 31 0:31 {root} {at} rw,relatime - cgroup cgroup rw,memory"
CGROUP_V2_MOUNT = "41 31 0:38 {root} {at} rw,relatime - cgroup2 cgroup2 rw"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """64 GiB, 40 of them available."""
    memory = psutil.virtual_memory()._replace(total=64 * GiB, available=40 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def proc(tmp_path: Path, cgroup: str, mount: str, root: str = "/") -> Path:
    """A /proc whose process is in `cgroup`, with a cgroup file system mounted at tmp/cg."""
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"11:cpu:/elsewhere\n{cgroup}\n")
    line = mount.format(root=root, at=tmp_path / "cg")
    (folder / "mountinfo").write_text(f"30 23 0:27 / /tmp rw shared:1 - tmpfs tmpfs rw\n{line}\n")
    return tmp_path / "proc"


def v1(folder: Path, limit: int, usage: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {inactive_file}\n")


def v2(folder: Path, limit: int | str, usage: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_this_machine(monkeypatch):
    """For real: within what psutil says, and something is left."""
    monkeypatch.undo()
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes <= psutil.virtual_memory().total


def test_no_cgroups(tmp_path):
    """macOS, or a sandbox without /proc."""
    memory = host_memory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (64 * GiB, 40 * GiB)
    assert memory.limited_by is None


def test_v2_limit_less_usage(tmp_path):
    """8 GiB of which 3 are used, 1 of these is cache that can go: 6 are left."""
    v2(tmp_path / "cg" / "box", 8 * GiB, 3 * GiB, GiB)
    memory = host_memory(proc(tmp_path, "0::/box", CGROUP_V2_MOUNT))
    assert (memory.total_bytes, memory.available_bytes) == (8 * GiB, 6 * GiB)
    assert memory.limited_by == str(tmp_path / "cg" / "box")


def test_v1_limit_less_usage(tmp_path):
    v1(tmp_path / "cg" / "box", 8 * GiB, 3 * GiB, GiB)
    memory = host_memory(proc(tmp_path, "4:memory:/box", CGROUP_V1_MOUNT))
    assert (memory.total_bytes, memory.available_bytes) == (8 * GiB, 6 * GiB)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_no_limit(tmp_path, limit):
    """`max`, and version 1's number for it."""
    make, mount = (v2, CGROUP_V2_MOUNT) if limit == "max" else (v1, CGROUP_V1_MOUNT)
    make(tmp_path / "cg" / "box", limit, GiB)
    cgroup = "0::/box" if limit == "max" else "4:memory:/box"
    memory = host_memory(proc(tmp_path, cgroup, mount))
    assert (memory.total_bytes, memory.available_bytes) == (64 * GiB, 40 * GiB)


def test_a_tighter_ancestor_counts(tmp_path):
    """A pod's limit stands above its container's."""
    v2(tmp_path / "cg" / "pod" / "box", 32 * GiB, GiB)
    v2(tmp_path / "cg" / "pod", 4 * GiB, 2 * GiB)
    memory = host_memory(proc(tmp_path, "0::/pod/box", CGROUP_V2_MOUNT))
    assert (memory.total_bytes, memory.available_bytes) == (4 * GiB, 2 * GiB)


def test_a_loose_limit_leaves_the_machine_s_memory(tmp_path):
    """A limit of 60 GiB does not make 59 GiB available where only 40 are."""
    v2(tmp_path / "cg" / "box", 60 * GiB, GiB)
    memory = host_memory(proc(tmp_path, "0::/box", CGROUP_V2_MOUNT))
    assert (memory.total_bytes, memory.available_bytes) == (60 * GiB, 40 * GiB)
    assert memory.limited_by is None


def test_container_that_sees_the_host_s_path(tmp_path):
    """Without a cgroup namespace the path is the host's; the mount point is the container's own."""
    v1(tmp_path / "cg", 8 * GiB, GiB)
    files = proc(tmp_path, "4:memory:/docker/abc", CGROUP_V1_MOUNT, root="/docker/abc")
    assert host_memory(files).total_bytes == 8 * GiB


def test_path_that_is_not_visible(tmp_path):
    """The path is outside what is mounted: the mount point's limit still holds."""
    v2(tmp_path / "cg", 8 * GiB, GiB)
    assert host_memory(proc(tmp_path, "0::/../../x", CGROUP_V2_MOUNT)).total_bytes == 8 * GiB


def test_more_used_than_allowed(tmp_path):
    """A limit that was lowered under a running process leaves nothing, not a negative number."""
    v2(tmp_path / "cg" / "box", 2 * GiB, 3 * GiB)
    assert host_memory(proc(tmp_path, "0::/box", CGROUP_V2_MOUNT)).available_bytes == 0

# SPDX-License-Identifier: Apache-2.0
"""Which cores compute: VLLM_CPU_OMP_THREADS_BIND, the process's affinity, the cgroup's quota."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_SYS_CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ThreadPlan:
    """Cores to compute on, and whether threads are kept to them."""

    cpus: tuple[int, ...]
    num_threads: int
    bind: bool


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the logical CPUs that this process may run on."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # macOS has no affinity
        return tuple(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`"0-3,8"` -> `(0, 1, 2, 3, 8)`.

    Raises:
        ValueError: the text is no such list.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part!r} in {text!r} is neither a core nor a range such as 0-3")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(dict.fromkeys(cpus))


def plan_threads(local_rank: int = 0, setting: str | None = None) -> ThreadPlan:
    """What VLLM_CPU_OMP_THREADS_BIND asks for.

    `auto`: one thread on each physical core that this process may use, no more than the cgroup's
    CPU quota. `nobind`: as many threads, free to move. A list `0-3,8`: these cores; lists of
    several ranks are separated by `|`.

    Raises:
        ValueError: the setting cannot be read, or lists too few ranks.
    """
    setting = envs.VLLM_CPU_OMP_THREADS_BIND if setting is None else setting
    usable = usable_cpus()
    if setting.strip().lower() in ("auto", "nobind", ""):
        cores = one_per_core(usable)
        num_threads = max(1, min(len(cores), _quota_cpus() or len(cores)))
        if os.environ.get("OMP_NUM_THREADS", "").isdigit():
            num_threads = max(1, int(os.environ["OMP_NUM_THREADS"]))
        bind = setting.strip().lower() != "nobind" and num_threads == len(cores)
        return ThreadPlan(cores, num_threads, bind)
    ranks = setting.split("|")
    if local_rank >= len(ranks):
        raise ValueError(f"VLLM_CPU_OMP_THREADS_BIND={setting!r} has no list for rank {local_rank}")
    cpus = parse_cpu_list(ranks[local_rank])
    return ThreadPlan(cpus, len(cpus), bind=True)


def bind_threads(local_rank: int = 0) -> ThreadPlan:
    """Keeps this process's threads to the planned cores and sets torch's thread count.

    Call it before the first parallel region: threads inherit the affinity of the one that starts
    them. Failing to bind is a warning; a setting that cannot be read is one too, and `nobind` then.
    """
    import torch

    try:
        plan = plan_threads(local_rank)
    except ValueError as error:
        logger.warning("threads are not bound: %s", error)
        plan = plan_threads(local_rank, "nobind")
    if plan.bind:
        _set_affinity(plan.cpus)
    torch.set_num_threads(plan.num_threads)
    return plan


def _set_affinity(cpus: tuple[int, ...]) -> None:
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cpus)
    except (OSError, AttributeError) as error:
        logger.warning(
            "threads are not bound to cores %s: %s. VLLM_CPU_OMP_THREADS_BIND=nobind silences this",
            ",".join(map(str, cpus)),
            error,
        )


def one_per_core(cpus: tuple[int, ...]) -> tuple[int, ...]:
    """The first logical CPU of each physical core: hyperthreads of one share its vector units."""
    firsts: dict[frozenset[int], int] = {}
    for cpu in cpus:
        firsts.setdefault(_siblings(cpu), cpu)
    return tuple(firsts.values())


def _siblings(cpu: int) -> frozenset[int]:
    try:
        text = (_SYS_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        return frozenset(parse_cpu_list(text))
    except (OSError, ValueError):
        return frozenset({cpu})


def _quota_cpus() -> int | None:
    """Whole CPUs that the cgroup's quota amounts to, None without a quota."""
    try:
        version_2 = (_CGROUP / "cpu.max").read_text().split()
        quota, period = version_2[0], version_2[1]
    except (OSError, IndexError):
        try:
            quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, math.ceil(int(quota) / int(period)))

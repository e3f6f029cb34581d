# SPDX-License-Identifier: Apache-2.0
"""Which cores compute, and that failing to bind them is a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm.platforms import cpu_threads
from vllm.platforms.cpu_threads import ThreadPlan, one_per_core, parse_cpu_list, plan_threads


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Four cores of two hyperthreads each, no quota."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads, "usable_cpus", lambda: tuple(range(8)))
    monkeypatch.setattr(cpu_threads, "_siblings", lambda cpu: frozenset({cpu % 4, cpu % 4 + 4}))
    monkeypatch.setattr(cpu_threads, "_quota_cpus", lambda: None)


def test_lists():
    assert parse_cpu_list("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_cpu_list(" 2 , 1-2") == (2, 1)
    for wrong in ("", "a", "1-", "-1", "0-3,,8"):
        with pytest.raises(ValueError, match="neither a core nor a range"):
            parse_cpu_list(wrong)


def test_auto_takes_one_thread_a_core():
    """Two threads on one core share its vector units: slower than one."""
    assert one_per_core((1, 5, 2, 6)) == (1, 2)
    assert plan_threads(0, "auto") == ThreadPlan((0, 1, 2, 3), 4, bind=True)
    assert plan_threads(0, "nobind") == ThreadPlan((0, 1, 2, 3), 4, bind=False)


def test_quota_limits_threads(monkeypatch):
    """A container with a quota of 2 CPUs on a large machine is throttled if 4 threads spin; which
    cores it gets is the kernel's choice, so nothing is bound."""
    monkeypatch.setattr(cpu_threads, "_quota_cpus", lambda: 2)
    assert plan_threads(0, "auto") == ThreadPlan((0, 1, 2, 3), 2, bind=False)


def test_omp_num_threads_is_honoured(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan_threads(0, "auto").num_threads == 3


def test_lists_of_ranks():
    """Each rank takes its own list; a missing one is said, not guessed."""
    assert plan_threads(1, "0-1|2,3") == ThreadPlan((2, 3), 2, bind=True)
    with pytest.raises(ValueError, match="no list for rank 2"):
        plan_threads(2, "0-1|2,3")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_quota_files(monkeypatch, tmp_path, files, expected):
    """Both versions of cgroups, with and without a limit."""
    monkeypatch.undo()
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu_threads, "_CGROUP", tmp_path)
    assert cpu_threads._quota_cpus() == expected


@pytest.mark.parametrize("setting", ["900-901", "nonsense"])
def test_failing_to_bind_is_a_warning(setting):
    """In a new process, for real: cores that do not exist must not stop the start."""
    code = "from vllm.platforms.cpu_threads import bind_threads as b; print(b().num_threads >= 1)"
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": setting}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
    assert "threads are not bound" in done.stderr


def test_binding_works():
    """In a new process, for real: every thread stays on the cores of the list."""
    first = min(os.sched_getaffinity(0))
    code = (
        "import os, torch; from vllm.platforms.cpu_threads import bind_threads; bind_threads();"
        "torch.rand(600, 600) @ torch.rand(600, 600);"
        "ids = os.listdir('/proc/self/task');"
        f"assert all(os.sched_getaffinity(int(i)) == {{{first}}} for i in ids);"
        "print(torch.get_num_threads())"
    )
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": str(first)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr

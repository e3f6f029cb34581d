# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: its answers come back, and its end is told at once."""

from __future__ import annotations

import os

import pytest

from tests.benchmarks.engines import CannedSpec
from vllm import env_override
from vllm.benchmarks.process import EngineFailed, engine_processes, warn_if_busy
from vllm.benchmarks.workload import random_workload
from vllm.platforms.cpu_threads import plan_threads

WORKLOAD = random_workload(2, 3, 4, vocab_size=100, seed=0)


def test_answers_and_threads():
    """Both get the planned number of threads; this process's own setting is left as it was."""
    before = os.environ.get("OMP_NUM_THREADS")
    with engine_processes([CannedSpec("a"), CannedSpec("b")]) as engines:
        for engine in engines:
            engine.prepare(WORKLOAD)
            assert engine.run(WORKLOAD).seconds == 1.0
            assert engine.run(WORKLOAD).token_ids == ((7,) * 4,) * 2
            assert engine.info().num_threads == plan_threads().num_threads
        processes = [engine._process for engine in engines]
    assert os.environ.get("OMP_NUM_THREADS") == before
    assert [process.exitcode for process in processes] == [0, 0]


def test_busy_machine_is_told(caplog_vllm):
    """Guards against a ratio that only says which engine bears a crowded machine better."""
    warn_if_busy(5.0)
    assert not caplog_vllm.records
    warn_if_busy(60.0)
    assert "60 % of this machine's CPUs" in caplog_vllm.text


@pytest.mark.parametrize("users", [None, "77"])
def test_peer_has_its_own_defaults(users, monkeypatch):
    """What we set for our own engine is no handicap, or help, to the peer; what the user set holds
    for both."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users:
        monkeypatch.setenv("GOMP_SPINCOUNT", users)
        monkeypatch.setattr(env_override, "changed", [])
    else:
        monkeypatch.setattr(env_override, "changed", ["GOMP_SPINCOUNT"])
    specs = [CannedSpec("ours"), CannedSpec("peer", is_peer=True)]
    with engine_processes(specs) as (ours, peer):
        assert ours.info().settings == (users or env_override._SPINS)
        assert peer.info().settings == (users or "")


@pytest.mark.parametrize(
    "fault, message",
    [("raises in build", "canned: ValueError: no such model"), ("dies in build", "exit status 11")],
)
def test_engine_that_cannot_be_built(fault, message):
    """Guards against waiting for ever for an engine whose process is gone."""
    with pytest.raises(EngineFailed, match=message), engine_processes([CannedSpec(fault=fault)]):
        pytest.fail("it was never built")


@pytest.mark.parametrize(
    "fault, message", [("raises in run", "IndexError"), ("dies in run", "exit status 9")]
)
def test_engine_that_fails_later(fault, message):
    """One that only raised is there for the next workload."""
    with engine_processes([CannedSpec(fault=fault)]) as (engine,):
        with pytest.raises(EngineFailed, match=message):
            engine.run(WORKLOAD)
        if fault == "raises in run":
            assert engine.info().name == "canned"
        else:
            with pytest.raises(EngineFailed, match="ended with exit status"):
                engine.run(WORKLOAD)


def test_engine_that_never_answers():
    """Guards against a run that waits for ever: the engine is ended and the others go on."""
    failed = {}
    faults = {"hangs": "hangs in run", "b": "", "c": "raises in build"}
    specs = [CannedSpec(name, fault) for name, fault in faults.items()]
    with engine_processes(specs, failed.__setitem__, timeout_s=0.5) as (hangs, other):
        with pytest.raises(EngineFailed, match="hangs gave no answer within 0.5 s"):
            hangs.run(WORKLOAD)
        assert not hangs._process.is_alive()
        assert other.run(WORKLOAD).seconds == 1.0
    assert failed == {"c": "c: ValueError: no such model"}

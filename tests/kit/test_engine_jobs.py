# SPDX-License-Identifier: Apache-2.0
"""What becomes of a child that hangs or dies, and by which name each end of a run is reported."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

# Answers all but the jobs `hang` and `die`. A child of its own holds its standard output.
CHILD = """
import json, subprocess, sys, time
for line in sys.stdin:
    model = json.loads(line)["model"]
    print("other lines", flush=True)
    if model == "die":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.exit("out of memory")
    if model == "hang":
        print("waiting for a lock", file=sys.stderr, flush=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    while model == "hang":
        print("noise", flush=True)
        time.sleep(0.05)
    print("VLLM-PLATFORM-KIT-RESULT " + json.dumps({"status": "ran"}), flush=True)
"""


@pytest.fixture
def run(kit, tmp_path, monkeypatch):
    """Of jobs by their names, with a second for those that hang."""
    from vllm_platform_kit import engine_jobs

    monkeypatch.setattr(engine_jobs, "CHILD", (sys.executable, "-c", CHILD))

    def run(*models: str, seconds: float):
        engines = engine_jobs.Engines(str(tmp_path), seconds)
        results = [engines.run(engine_jobs.Job(model)) for model in models]
        engines.close()
        return results

    before = set(threading.enumerate())
    yield run
    # Its reader ends when the last process that holds the child's output has.
    assert set(threading.enumerate()) == before


def test_a_child_that_hangs_is_killed_with_its_own(run):
    """Guards against a session that waits for ever, and against processes that outlive it. Lines that
    are no answer do not prolong the wait; the next job has a child of its own."""
    hung, next_one = run("hang", "fine", seconds=3)
    assert hung.status == "died" and hung.error == "no answer within 3 s: waiting for a lock"
    assert next_one.status == "ran"


def test_a_child_that_dies_is_known_by_its_status(run):
    """Also where a process that it started lives on and holds its output."""
    fine, dead, next_one = run("fine", "die", "again", seconds=60)
    assert (fine.status, next_one.status) == ("ran", "ran")
    assert dead.error == "the engine's process ended with status 1: out of memory"


@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_a_timeout_that_is_none(kit_site, tmp_path, seconds):
    """Refused when pytest starts, before any engine does."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--vllm-kit-timeout={seconds}"],
        cwd=tmp_path, env=kit_site.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "--vllm-kit-timeout" in done.stderr


def codes(findings) -> list[str]:
    return [one.code for one in findings]


def test_each_end_of_a_run_has_its_name(kit):
    """A run that raised once it had started is no failed start: the advice would lead astray."""
    from vllm_platform_kit.engine_jobs import GENERATING, LOOKING, Result
    from vllm_platform_kit.outcomes import ended

    assert ended(Result("ran"), "a model") == []
    assert codes(ended(Result("died", "status -6"), "a model")) == ["MODEL_CRASH"]
    refused = Result("refused", "no device", "RuntimeError")
    (start,) = ended(refused, "a model")
    assert start.code == "MODEL_START" and "RuntimeError: no device" in start.line
    (start,) = ended(refused, "NixlConnector", "CONNECTOR_START")
    assert start.code == "CONNECTOR_START" and "start with a KV connector" in start.line
    (raised,) = ended(Result("failed", "5", "KeyError", GENERATING, "a.py:3 in f"), "a model")
    assert raised.code == "MODEL_RAISES" and raised.what == (
        "KeyError, while it generated: 5 (a.py:3 in f)"
    )
    looked = Result("failed", "5", "KeyError", LOOKING, "a.py:3 in f")
    assert codes(ended(looked, "a model")) == ["PROBE_RAISES"]


def test_block_sizes_and_tokens(kit):
    """Wrong tokens, and what is no clear refusal, each by its name; a clear one is right."""
    from vllm_platform_kit.engine_jobs import Result
    from vllm_platform_kit.outcomes import of_block_size, wrong_tokens

    wrong = Result("ran", expected=[[1, 2]], tokens=[[1, 3]])
    assert codes(of_block_size(wrong, 8)) == ["BLOCK_SIZE_TOKENS"]
    assert codes(wrong_tokens(wrong, "a model")) == ["MODEL_TOKENS"]
    right = Result("ran", expected=[[1, 2]], tokens=[[1, 2]])
    assert of_block_size(right, 8) == [] == wrong_tokens(right, "a model")
    assert of_block_size(Result("refused", "block size 8: one of 16", "ValueError"), 8) == []
    for unclear in (
        Result("refused", "block size", "AssertionError"),
        Result("refused", "bad value", "ValueError"),
        Result("died", "no answer within 9 s: it said nothing"),
    ):
        assert codes(of_block_size(unclear, 8)) == ["BLOCK_SIZE_UNCLEAR"]

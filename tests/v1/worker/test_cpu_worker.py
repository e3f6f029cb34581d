# SPDX-License-Identifier: Apache-2.0
"""The CPU's worker: what it starts ends, and what it shares is one thread's at a time."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm.v1.worker.cpu_worker import CPUWorker


@pytest.fixture
def worker() -> CPUWorker:
    """One without a model; its process sleeps for ever."""
    worker = object.__new__(CPUWorker)
    code = "import threading; threading.Event().wait()"
    worker._compilers = (subprocess.Popen([sys.executable, "-c", code]),)
    return worker


def test_the_compiling_process_ends_with_a_failed_start(worker):
    """Fault: it goes on alone, on a core that the next start needs."""

    def fail(load_dummy_weights: bool) -> None:
        raise ValueError("no such weights")

    (process,), worker.model_runner = worker._compilers, SimpleNamespace(load_model=fail)
    with pytest.raises(ValueError, match="no such weights"):
        worker.load_model()
    assert process.returncode is not None and worker._compilers == ()


def test_a_compiling_process_that_fails_is_reported(worker, caplog_vllm):
    """Fault: the second compilation seems to come from nowhere."""
    worker._compilers[0].kill()
    worker._await_compilers()
    assert "ended with -9" in caplog_vllm.text
    worker._await_compilers()  # there are none any more

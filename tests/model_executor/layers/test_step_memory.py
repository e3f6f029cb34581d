# SPDX-License-Identifier: Apache-2.0
"""Memory of a step's tensors, in a process of its own: the switch is the process's, for good."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_CODE = """
import resource
import torch
from vllm.model_executor.layers.cpu_ops.step_memory import keep_freed_memory

def pages_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (12, 48, 3, 90):
        torch.ones(size << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    before = pages_of_a_step()
kept = keep_freed_memory()
for _ in range(3):
    after = pages_of_a_step()
print(kept, before, after)
"""


def test_freed_tensors_are_used_again():
    """Counted in pages that the system handed out. Fault: each layer of an encoder gets its memory
    anew, a tenth of its time."""
    try:
        ctypes.CDLL(None).mallopt
    except AttributeError:
        pytest.skip("this C library has no mallopt")
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=True
    )
    kept, before, after = done.stdout.split()
    assert kept == "True"
    assert int(before) > 100 and int(after) < 10

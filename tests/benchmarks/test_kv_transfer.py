# SPDX-License-Identifier: Apache-2.0
"""`vllm bench kv-transfer`, the whole way: two processes, real NIXL, a line for each pair."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("nixl")


def test_each_pair_is_measured_beside_a_plain_read(tmp_path):
    """Guards against pairs that are left out, and against a READ that was not measured. Figures are
    not judged."""
    file = tmp_path / "results.json"
    arguments = ["--mbytes", "1", "--num-iters", "2", "--layouts", "kv-first", "fused",
                 "--block-sizes", "16", "--output-json", str(file)]  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "kv-transfer"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    names = {"kv-first/16", "fused/16"}
    assert {(one["here"], one["there"]) for one in results} == {(a, b) for a in names for b in names}
    for one in results:
        assert one["gb_per_s"] > 0 and one["raw_gb_per_s"] > 0 and one["of_same_runs"] > 0
        is_equal = one["here"] == one["there"]
        assert one["how"] == ("run by run" if is_equal else "staged and converted")
        assert one["num_descriptors"] >= (2 if one["here"] == one["there"] == "kv-first/16" else 1)
    assert "READ" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""A ratio is worth something only if both engines did the same work, in turn."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.engines import CannedEngine
from vllm.benchmarks.compare import compare
from vllm.benchmarks.report import comparison_json, comparison_text
from vllm.benchmarks.workload import random_workload

WORKLOAD = random_workload(4, 8, 16, vocab_size=100, seed=0)


def canned(ours: list[float], peer: list[float], **peer_options):
    """Engines whose warm-up run takes 100 s, which must not count."""
    return CannedEngine("vllm", [100.0, *ours]), CannedEngine(
        "peer", [100.0, *peer], **peer_options
    )


def test_medians_and_ratio():
    """The median, so that one disturbed round changes nothing; warm-up rounds do not count."""
    engines = canned([1.0, 1.1, 50.0], [2.2, 90.0, 2.0])
    comparison = compare(engines, WORKLOAD, num_iters=3, num_iters_warmup=1)
    assert comparison.ours.median_seconds == 1.1
    assert comparison.peer.median_seconds == 2.2
    assert comparison.ratio == pytest.approx(2.0)
    assert comparison.round_ratios == pytest.approx((2.2, 90.0 / 1.1, 0.04))


def test_rounds_alternate():
    """Guards against measuring one engine after the other, when the machine changes in between."""
    ours, peer = canned([1.0] * 4, [1.0] * 4)
    ours.calls = peer.calls = calls = []
    compare((ours, peer), WORKLOAD, num_iters=4, num_iters_warmup=1)
    assert calls[:4] == ["vllm prepare", "vllm run", "peer prepare", "peer run"]
    pairs = [calls[i : i + 2] for i in range(4, 12, 2)]
    assert pairs == [["vllm run", "peer run"], ["peer run", "vllm run"]] * 2


@pytest.mark.parametrize("length", [15, 17, 0])
def test_other_lengths_are_refused(length):
    """Guards against an engine that looks fast because it stopped early."""
    with pytest.raises(ValueError, match=f"peer gave 4 outputs of .{length}. tokens, not 4 of 16"):
        compare(canned([1.0], [1.0], output_len=length), WORKLOAD, 1, 1)


def test_same_first_tokens():
    same = compare(canned([1.0], [1.0]), WORKLOAD, 1, 1)
    other = compare(canned([1.0], [1.0], token=8), WORKLOAD, 1, 1)
    assert (same.same_first_tokens, other.same_first_tokens) == (4, 0)


def test_report_has_all_figures():
    comparison = compare(canned([1.0, 1.0], [3.0, 3.0]), WORKLOAD, 2, 1)
    result = json.loads(json.dumps(comparison_json(comparison)))
    assert result["ratio"] == 3.0
    assert [engine["name"] for engine in result["engines"]] == ["vllm", "peer"]
    assert [engine["output_tokens_per_second"] for engine in result["engines"]] == [64.0, 64.0 / 3]
    text = comparison_text(comparison)
    assert "4 requests, 8 tokens in, 16 out each" in text
    assert "ratio: 3.00 x peer" in text and "median of 2 rounds" in text

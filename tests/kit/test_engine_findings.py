# SPDX-License-Identifier: Apache-2.0
"""Faults that only a running engine shows: each is found by its own name. All engines start in one
process, a fault after the other."""

from __future__ import annotations

import sys

import pytest

WORKERS = "tests.kit.broken.workers"
# Worker -> model, the finding, words of its line.
FAULTS = {
    "HeadsFirstWorker": ("decoder", "LAYOUT_ORDER", "in memory by block, head, token, content"),
    "ContiguousWorker": ("decoder", "LAYOUT_BYTES", "of its page by the declared layout"),
    "UnalignedWorker": ("hybrid", "ALIGNMENT_PAGES", "share bytes of one allocation"),
    "ByIndexWorker": ("encoder-decoder", "BINDING_CACHE", "is bound to the cache of layer"),
    "UnmaskedWorker": ("decoder", "STALE_BYTES", "NaN in free pages changes request"),
}


@pytest.fixture(scope="module")
def engines(kit, kit_site, tmp_path_factory):
    """The kit's own runs, on the sound platform."""
    from vllm_platform_kit.engine_jobs import Engines

    engines = Engines(str(tmp_path_factory.mktemp("engines")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KIT_PLATFORM", "tests.kit.broken.platforms.SoundPlatform")
        # As a user may have it: the kit looks into the engine, which has to be in its process.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setattr("sys.path", [*kit_site.places("vllm_minimal_platform"), *sys.path])
        yield engines
        engines.close()


@pytest.fixture
def run(engines):
    from vllm_platform_kit.engine_jobs import Job

    def run(worker: str, model: str, **options):
        engine_args = {"worker_cls": f"{WORKERS}.{worker}", **options.pop("engine_args", {})}
        return engines.run(Job(model, engine_args, **options))

    return run


@pytest.mark.parametrize(
    ("worker", "model"),
    [
        ("SoundWorker", "decoder"),
        ("SoundWorker", "hybrid"),
        ("SoundWorker", "encoder-decoder"),
        ("AlignedWorker", "hybrid"),
    ],
)
def test_no_fault(run, worker, model):
    """Nothing is found, tokens are Transformers', and they are no constants."""
    result = run(worker, model)
    assert result.status == "ran", result.error
    assert result.findings == [] and result.tokens == result.expected
    assert all(len(set(tokens)) > 2 for tokens in result.expected)
    assert result.drawing.startswith("<svg")


@pytest.mark.parametrize("worker", FAULTS)
def test_fault_of_caches(run, worker):
    model, code, words = FAULTS[worker]
    result = run(worker, model)
    assert {one[0] for one in result.findings} == {code}, result
    assert words in result.findings[0][2]


def test_wrong_tokens(run):
    from vllm_platform_kit.outcomes import differences

    result = run("WrongScaleWorker", "decoder")
    (words,) = differences(result)
    assert result.findings == [] and "differs from Transformers from token" in words


def test_block_sizes(run):
    """One that is accepted and wrong, one that ends in an assertion; 16 is right with both."""
    for worker in ("SixteenTokensWorker", "AssertsWorker"):
        result = run(worker, "decoder", with_probes=False)
        assert result.tokens == result.expected
    result = run("SixteenTokensWorker", "decoder", engine_args={"block_size": 8}, with_probes=False)
    assert result.status == "ran" and result.tokens != result.expected
    result = run("AssertsWorker", "decoder", engine_args={"block_size": 24}, with_probes=False)
    assert result.status == "refused" and not result.is_refusal


def test_a_start_that_fails(run):
    result = run("SilentWorker", "decoder")
    assert (result.status, result.error_type) == ("refused", "RuntimeError")
    assert not result.is_refusal and "device 7 does not answer" in result.error


def test_an_engine_that_raises_while_it_generates(run):
    """No failed start: where it was raised is what helps."""
    result = run("RaisesWorker", "decoder")
    assert (result.status, result.tokens) == ("failed", [])
    assert result.told.startswith("ArithmeticError, while it generated: no such shape (backends.py:")
    assert "in _attend" in result.told


def test_registration(run):
    """Caches that move once they are registered: NIXL would send what was there before."""
    pytest.importorskip("nixl")
    result = run("SoundWorker", "hybrid", with_connector=True)
    assert result.status == "ran" and result.findings == [], result
    result = run("MovingWorker", "hybrid", with_connector=True)
    assert {one[0] for one in result.findings} == {"CONNECTOR_REGIONS"}
    assert "no registered region holds page 0" in result.findings[0][2]


@pytest.mark.slow
def test_a_process_that_dies(run):
    """The session goes on: the next engine has a process of its own."""
    result = run("DiesWorker", "decoder")
    assert result.status == "died" and "status -6" in result.error
    assert run("SoundWorker", "decoder", engine_args={"seed": 1}).status == "ran"

# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of the engine that prompts are read from, each request ends: those that it
concerns fail or are computed again, as the policy says, and all others have what one engine gives.
Afterwards nothing is left of the peer, and its successor serves.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.models.tiny import NATIVE, VOCAB_SIZE, make_model

from tests.distributed.kv_transfer.nixl.engine_host import Answers, Request, Setup
from tests.distributed.kv_transfer.nixl.engine_pairs import Geometry, Pair, make_pair
from vllm.triton_utils import HAS_TRITON

pytest.importorskip("nixl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"),
]

NUM_FROM_PEER, NUM_OTHERS, NUM_NEW_TOKENS = 6, 4, 5
ENGINE_ARGS = dict(
    dtype="float32", max_model_len=128, max_num_seqs=16, kv_cache_memory_bytes=1 << 20
)
FUSED_HND, FUSED_NHD = (
    Geometry.of(16, full_attention=layout) for layout in ("CPU_ATTN", "TORCH_ATTN")
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model(NATIVE["llama"], folder)
    return Setup(str(folder), ENGINE_ARGS)


@pytest.fixture(scope="module")
def tcp(tmp_path_factory) -> Iterator[Pair]:
    """Reads need the peer's help: while it stands still, they are under way."""
    with make_pair(tmp_path_factory.mktemp("tcp") / "site", UCX_TLS="tcp,self") as pair:
        yield pair


@pytest.fixture(scope="module")
def shared_memory(tmp_path_factory) -> Iterator[Pair]:
    """Reads do not need it: they end, and only its word that the pages were kept is missing."""
    with make_pair(tmp_path_factory.mktemp("shared") / "site") as pair:
        yield pair


class Scene:
    """Requests for one decode engine, a part of which name pages of the prefill engine."""

    def __init__(self, pair: Pair, setup: Setup, here: Geometry) -> None:
        rng = random.Random(0)
        lengths = [5, 16, 17, 40, 64, 100, 3, 33, 48, 70]
        self.requests = [
            Request([rng.randrange(3, VOCAB_SIZE) for _ in range(n)]) for n in lengths
        ]
        assert len(lengths) == NUM_FROM_PEER + NUM_OTHERS
        self.pair, self.setup, self.here = pair, setup, here
        self.name, _ = pair.made(pair.decode, setup, here)
        pair.decode.reset_prefix_cache(self.name)
        self.expected = pair.decode.run(self.name, self.requests, NUM_NEW_TOKENS).tokens
        pair.decode.reset_prefix_cache(self.name)

    def keep(self, requests: list[Request]) -> list[Request]:
        """The requests, computed by the prefill engine, with the names of their pages."""
        name, _ = self.pair.made(self.pair.prefill, replace(self.setup, policy="fail"), FUSED_HND)
        first = self.pair.prefill.run(name, requests, 1, keep=True)
        told = zip(requests, first.kv_transfer_params)
        return [replace(request, kv_transfer_params=params) for request, params in told]

    def start(self) -> None:
        """All requests at once; the last do not name a peer."""
        self.pair.decode.start(self.name, self._asked, NUM_NEW_TOKENS)

    def prepare(self) -> None:
        """What prefill has to do for `start`."""
        self._asked = self.keep(self.requests[:NUM_FROM_PEER]) + self.requests[NUM_FROM_PEER:]

    def check(self, answers: Answers, num_lost: int) -> None:
        """As many of the requests as were lost have failed, or all have their tokens."""
        failed = [i for i, reason in enumerate(answers.finish_reasons) if reason == "error"]
        assert len(failed) == (num_lost if self.setup.policy == "fail" else 0)
        assert all(i < NUM_FROM_PEER for i in failed) and not any(answers.tokens[i] for i in failed)
        for i in set(range(len(self.requests))) - set(failed):
            assert answers.tokens[i] == self.expected[i], i
        assert answers.num_read == NUM_FROM_PEER - num_lost

    def check_successor(self) -> None:
        """The prefill engine that is there now serves, and no other is known."""
        self.pair.decode.reset_prefix_cache(self.name)
        self.prepare()
        self.start()
        self.check(self.pair.decode.finish(), 0)
        rest = self.pair.decode.settle(self.name)
        prefill = replace(self.setup, policy="fail")
        (_, made) = self.pair.made(self.pair.prefill, prefill, FUSED_HND)
        assert rest == {"peers": [made.engine_id], "receives": 0, "staging_in_use": 0}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("here", [FUSED_HND, FUSED_NHD], ids=["read-in-place", "converted"])
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_peer_that_is_killed_amidst_reads(request, setup, transport, here, policy):
    """It stands still when the reads begin, so that none of them has ended in peace, and dies."""
    pair: Pair = request.getfixturevalue(transport)
    scene = Scene(pair, replace(setup, policy=policy), here)
    pair.decode.run(scene.name, scene.keep(scene.requests[:1]), 1)  # Connects.
    pair.decode.reset_prefix_cache(scene.name)
    scene.prepare()
    os.kill(pair.prefill.process.pid, signal.SIGSTOP)
    num_before = pair.decode.num_reads
    scene.start()
    wait_until(lambda: pair.decode.num_reads >= num_before + NUM_FROM_PEER)
    os.kill(pair.prefill.process.pid, signal.SIGKILL)
    scene.check(pair.decode.finish(), NUM_FROM_PEER)
    gone = {"peers": [], "receives": 0, "staging_in_use": 0}
    wait_until(lambda: pair.decode.settle(scene.name) == gone)
    pair.restart_prefill()
    scene.check_successor()


@pytest.mark.parametrize("here", [FUSED_HND, FUSED_NHD], ids=["read-in-place", "converted"])
def test_a_peer_that_stands_still_amidst_reads(tcp, setup, here):
    """The connection stays and nothing comes: the peer is given up with all that is read from it.
    When it goes on it serves again."""
    scene = Scene(tcp, replace(setup, policy="fail", options={"timeout_seconds": 2.0}), here)
    tcp.decode.run(scene.name, scene.keep(scene.requests[:1]), 1)  # Connects.
    tcp.decode.reset_prefix_cache(scene.name)
    scene.prepare()
    os.kill(tcp.prefill.process.pid, signal.SIGSTOP)
    try:
        scene.start()
        scene.check(tcp.decode.finish(), NUM_FROM_PEER)
    finally:
        os.kill(tcp.prefill.process.pid, signal.SIGCONT)
    assert "nothing has come from engine" in tcp.decode.log
    scene.check_successor()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_peer_that_does_not_shake_hands(shared_memory, setup, policy):
    """It stands still before the first word. When it goes on it serves again."""
    pair = shared_memory
    pair.restart_prefill()
    quick = replace(setup, policy=policy, options={"timeout_seconds": 0.5})
    scene = Scene(pair, quick, FUSED_HND)
    scene.prepare()
    os.kill(pair.prefill.process.pid, signal.SIGSTOP)
    try:
        scene.start()
        scene.check(pair.decode.finish(), NUM_FROM_PEER)
    finally:
        os.kill(pair.prefill.process.pid, signal.SIGCONT)
    assert "does not answer" in pair.decode.log
    scene.check_successor()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("here", [FUSED_HND, FUSED_NHD], ids=["read-in-place", "converted"])
def test_an_exception_in_a_transfer(shared_memory, setup, here, policy):
    """Of one request out of six."""
    scene = Scene(shared_memory, replace(setup, policy=policy), here)
    scene.prepare()
    shared_memory.decode.fail_next_read(scene.name)
    scene.start()
    scene.check(shared_memory.decode.finish(), 1)
    scene.check_successor()

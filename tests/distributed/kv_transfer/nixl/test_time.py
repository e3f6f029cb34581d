# SPDX-License-Identifier: Apache-2.0
"""Who waits for his turn has all his time still before him, and a dead peer is waited for once, not
once for each request. Real workers and real NIXL; the clock is the test's, and so is when a read is
seen to have ended.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.distributed.kv_transfer.nixl.ends import (
    End,
    Layout,
    ends,  # noqa: F401
    read,
    step_until,
)
from tests.v1.worker.kv_cache_fakes import Fused, KVFirst
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import peer, peers, receive, staging, worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Transfer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta

IN_PLACE, CONVERTED = Layout(Fused), Layout(KVFirst)
# Of the prefill engines: blocks of 2 KiB, two a page, and a buffer for four of them.
PAGES_PER_READ = 2
SECONDS = 30.0


class Flight:
    """A read that is not seen to have ended before `may_end`, nor stopped while `is_stuck`."""

    def __init__(self, transfer: Transfer, peer_name: str) -> None:
        self.transfer, self.peer_name = transfer, peer_name
        self.nbytes, self.num_descriptors = transfer.nbytes, transfer.num_descriptors
        self.may_end = self.is_stuck = self.was_seen = False

    def is_done(self) -> bool:
        self.was_seen = self.may_end and self.transfer.is_done()
        return self.was_seen

    def release(self) -> bool:
        return not self.is_stuck and self.transfer.release()


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as the connector reads them."""
    clock = SimpleNamespace(now=1000.0)
    told = SimpleNamespace(monotonic=lambda: clock.now)
    for module in (peer, peers, receive, staging, worker):
        monkeypatch.setattr(module, "time", told)
    return clock


@pytest.fixture
def scene(ends, clock, monkeypatch):  # noqa: F811
    """A decode engine that is connected to some prefill engines, and the flights of its reads from
    then on."""

    def make(*layouts: Layout) -> tuple[End, list[End], list[Flight]]:
        decode = ends(IN_PLACE, timeout_seconds=SECONDS, staging_bytes=1, peer_idle_seconds=1e6)
        prefills = [ends(layout) for layout in layouts]
        for i, prefill in enumerate(prefills):
            prefill.keep(f"connects{i}")
            read(decode, prefill, ([1],), ([1],), (16,), f"connects{i}")
        flights: list[Flight] = []
        start_read = decode.worker.agent.read

        def gated(name, runs, memory) -> Flight:
            flights.append(Flight(start_read(name, runs, memory), name))
            return flights[-1]

        monkeypatch.setattr(decode.worker.agent, "read", gated)
        return decode, prefills, flights

    return make


def meta(prefill: End, name: str, *pages: int) -> ReqMeta:
    return ReqMeta((list(pages),), (16 * len(pages),), prefill.remote((list(pages),), name))


def let(flight: Flight, *some: End) -> None:
    """A read ends."""
    flight.may_end = True
    step_until(lambda: flight.was_seen, *some)


def peer_names(decode: End) -> set[str]:
    return {each.key.engine_id for each in decode.worker.peers}


@pytest.mark.parametrize("layout", [IN_PLACE, CONVERTED], ids=["in place", "converted"])
def test_all_come_at_once_and_each_is_slow(scene, clock, layout):
    """The whole takes many times as long as a read may. Guards against a time that runs while
    others have the buffer, or the network."""
    decode, [prefill], flights = scene(layout)
    pages = [2, 3, 4, 5]
    names = [f"r{i}" for i in range(6)]
    prefill.keep(*names)
    decode.step(reqs_to_recv={name: meta(prefill, name, *pages) for name in names})
    began, num_ended = clock.now, 0
    while num_ended < len(flights):
        clock.now += 0.7 * SECONDS
        let(flights[num_ended], decode, prefill)
        num_ended += 1
        decode.step()
    step_until(lambda: set(names) <= decode.received, decode, prefill)
    assert not decode.invalid and clock.now - began > 4 * SECONDS
    assert num_ended == len(names) * (len(pages) // PAGES_PER_READ if layout is CONVERTED else 1)
    for name in decode.key_value:
        mine, theirs = (end.tokens(name, pages, 64) for end in (decode, prefill))
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs))


@pytest.mark.parametrize("layout", [IN_PLACE, CONVERTED], ids=["in place", "converted"])
def test_a_dead_peer_is_waited_for_once(scene, clock, layout):
    """Many requests read from a peer that says nothing any more; one that came after them reads
    from another. Guards against a time for each that waits for the buffer."""
    decode, [dead, alive], flights = scene(layout, layout)
    names = [f"r{i}" for i in range(8)]
    alive.keep("alive")
    metas = {name: meta(dead, name, 2, 3, 4) for name in names}
    decode.step(reqs_to_recv={**metas, "alive": meta(alive, "alive", 5)})
    clock.now += SECONDS - 1
    decode.step()
    assert not decode.received & {*names, "alive"}
    clock.now += 2
    if layout is IN_PLACE:
        flights[-1].may_end = True
    decode.step()
    assert set(names) <= decode.received and decode.invalid == {2, 3, 4}
    let(flights[-1], decode, alive)
    step_until(lambda: "alive" in decode.received, decode, alive)
    assert decode.invalid == {2, 3, 4} and peer_names(decode) == {alive.worker.engine_id}
    assert not decode.worker._staging or not decode.worker._staging._taken


def test_a_read_that_is_stuck_is_alone(scene, clock):
    """The peer sends what was asked for later. Only the stuck one fails, and in its time."""
    decode, [prefill], flights = scene(IN_PLACE)
    prefill.keep("stuck", "b", "c")
    pages = {"stuck": 2, "b": 3, "c": 4}
    decode.step(reqs_to_recv={name: meta(prefill, name, page) for name, page in pages.items()})
    clock.now += 10
    let(flights[1], decode, prefill)
    clock.now += SECONDS - 9
    decode.step()
    assert "stuck" in decode.received and decode.invalid == {2}
    let(flights[2], decode, prefill)
    step_until(lambda: {"b", "c"} <= decode.received, decode, prefill)
    assert decode.invalid == {2}


def test_a_request_that_the_peer_never_had(scene, clock):
    """Its answer does not come, which says nothing of the peer: another read of it goes on. Guards
    against peers that are given up because a request has a false name."""
    decode, [prefill], flights = scene(IN_PLACE)
    decode.step(reqs_to_recv={"false": meta(prefill, "never kept", 2)})
    let(flights[0], decode, prefill)
    clock.now += SECONDS - 1
    prefill.keep("a")
    decode.step(reqs_to_recv={"a": meta(prefill, "a", 3)})
    clock.now += 2
    decode.step()
    assert "false" in decode.received and decode.invalid == {2}
    (its_peer,) = decode.worker.peers
    assert its_peer.is_ready and not its_peer.is_suspect
    let(flights[1], decode, prefill)
    step_until(lambda: "a" in decode.received, decode, prefill)
    assert decode.invalid == {2} and set(decode.worker.peers) == {its_peer}


def test_room_goes_to_who_came_first(scene, clock):
    """From whatever peer. Guards against requests that wait for ever, since their time does not
    run, while another peer's go before them."""
    decode, [one, two], flights = scene(CONVERTED, CONVERTED)
    first, second = (each.agent_name for each in decode.worker.peers)
    one.keep("a", "c")
    two.keep("b")
    for name, end in (("a", one), ("b", two), ("c", one)):
        decode.step(reqs_to_recv={name: meta(end, name, 2, 3)})
        clock.now += 0.01
    for i in range(3):
        let(flights[i], decode, one, two)
        decode.step()
    assert [flight.peer_name for flight in flights] == [first, second, first]
    step_until(lambda: {"a", "b", "c"} <= decode.received, decode, one, two)
    assert not decode.invalid


def test_room_that_nobody_gives_back(scene, clock, caplog_vllm):
    """A read that NIXL cannot stop keeps the whole buffer. Guards against waiting for ever."""
    decode, [prefill], flights = scene(CONVERTED)
    prefill.keep("a", "b")
    decode.step(reqs_to_recv={name: meta(prefill, name, 2, 3) for name in ("a", "b")})
    flights[0].is_stuck = True
    decode.step(finished={"a"})
    clock.now += 2 * SECONDS - 1
    decode.step()
    assert not decode.received & {"a", "b"}
    clock.now += 2
    decode.step()
    assert "b" in decode.received and "a" not in decode.received
    assert "no room in the staging buffer for 60 s" in caplog_vllm.text
    flights[0].is_stuck = False
    decode.step()
    assert "a" in decode.received and not decode.worker._staging._taken

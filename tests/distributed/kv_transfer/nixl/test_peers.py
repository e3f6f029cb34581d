# SPDX-License-Identifier: Apache-2.0
"""Which peers an engine connects to is said by requests: however many and whatever they name, there
are few connections, and no request disturbs another. Real workers and real NIXL."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from types import SimpleNamespace

import pytest
import zmq

from tests.distributed.kv_transfer.nixl.ends import (
    End,
    Layout,
    ends,  # noqa: F401
    read,
    step_until,
)
from tests.v1.worker.kv_cache_fakes import Fused
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    HeartbeatInfo,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.options import NixlOptions
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import Peer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

LAYOUT = Layout(Fused)


@pytest.fixture
def silent():
    """Ports on which somebody listens and says nothing."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(zmq.Context.instance().socket(zmq.ROUTER)) for _ in "abc"]
        yield [one.bind_to_random_port("tcp://127.0.0.1") for one in sockets]


@pytest.fixture
def silent_tcp():
    """A port on which connections are accepted and nothing is said."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        yield server.getsockname()[1]


def ask(decode: End, remote: RemoteMeta, name: str, page: int) -> None:
    decode.step(reqs_to_recv={name: ReqMeta(([page],), (16,), remote)})


def nobody(port: int, engine_id: str) -> RemoteMeta:
    return RemoteMeta(([1],), "127.0.0.1", port, engine_id, "r")


def connected(decode: End) -> set[Peer]:
    return {peer for peer in decode.worker.peers if peer.is_ready}


def test_addresses_that_are_silent_take_no_others_places(ends, silent_tcp):  # noqa: F811
    """More requests than there are places name addresses that accept a connection and say nothing.
    Engines that are connected stay so and are read from at once; one that is not waits for its turn
    and is read too. Guards against peers that are displaced, or kept out, on a client's word."""
    decode = ends(LAYOUT, max_peers=16)
    known = [ends(LAYOUT), ends(LAYOUT)]
    newcomer = ends(LAYOUT)
    for i, prefill in enumerate(known):
        prefill.keep(f"before{i}", f"amidst{i}")
        read(decode, prefill, ([1 + i],), ([2],), (16,), f"before{i}")
    before = connected(decode)
    decode.worker.peers._patience_seconds = 60.0
    junk = [nobody(silent_tcp, f"e{i}") for i in range(40)]
    metas = {f"junk{i}": ReqMeta(([11],), (16,), remote) for i, remote in enumerate(junk)}
    decode.step(reqs_to_recv=metas)
    newcomer.keep("new")
    ask(decode, newcomer.remote(([2],), "new"), "new", 5)
    for i, prefill in enumerate(known):
        read(decode, prefill, ([3 + i],), ([4],), (16,), f"amidst{i}")
    assert connected(decode) == before and "new" not in decode.received
    assert len(decode.worker.peers) == len(before) + 16 // 2
    decode.worker.peers._patience_seconds = 0.1
    step_until(lambda: "new" in decode.received, decode, newcomer)
    assert connected(decode) > before and decode.invalid == {11}

    def every_silent_one_is_given_up() -> bool:
        """On a slow machine some have their turn only now: none is left its 30 seconds."""
        for peer in set(decode.worker.peers) - connected(decode):
            peer._deadline = 0.0
        return metas.keys() <= decode.received

    step_until(every_silent_one_is_given_up, decode)
    assert decode.invalid == {11} and set(decode.worker.peers) == connected(decode)


def test_a_request_that_waits_for_a_handshake_ends(ends, silent_tcp, caplog_vllm):  # noqa: F811
    """One is aborted, the other's time is over before there is a place."""
    decode = ends(LAYOUT, max_peers=2, timeout_seconds=0.5)
    decode.worker.peers._patience_seconds = 60.0
    for i in range(3):
        ask(decode, nobody(silent_tcp, f"e{i}"), f"r{i}", i + 1)
    assert len(decode.worker.peers) == 1 and not decode.received
    decode.step(finished={"r1"})
    assert decode.received == {"r1"} and decode.invalid == {2}
    ask(decode, nobody(silent_tcp, "e3"), "r3", 4)
    decode.worker.peers._connect = lambda remote: pytest.fail("its time is over")
    (first,) = decode.worker.peers
    first._deadline += 60
    step_until(lambda: {"r2", "r3"} <= decode.received, decode)
    assert "r0" not in decode.received and decode.invalid == {2, 3, 4}
    assert "1 handshakes are under way" in caplog_vllm.text


def test_an_engine_makes_way_for_another_that_has_shown_itself(ends, silent_tcp):  # noqa: F811
    """Of two that are connected, as many as may be, the one that was read from last stays."""
    decode, *others = ends(LAYOUT, max_peers=2), *(ends(LAYOUT) for _ in range(3))
    for i, prefill in enumerate(others[:2]):
        prefill.keep(f"r{i}")
        read(decode, prefill, ([1 + i],), ([2],), (16,), f"r{i}")
    before = connected(decode)
    ask(decode, nobody(silent_tcp, "e"), "junk", 11)
    decode.step(finished={"junk"})
    assert connected(decode) == before
    others[2].keep("r2")
    read(decode, others[2], ([3],), ([2],), (16,), "r2")
    names = {peer.key.engine_id for peer in connected(decode)}
    assert names == {end.worker.engine_id for end in others[1:]} and decode.invalid == {11}


def test_a_request_too_many_is_refused_by_name(ends, caplog_vllm):  # noqa: F811
    """An engine with something to do keeps its place; who gets none fails at once, as the policy
    says, and can come again. Guards against a connection for each engine that requests name."""
    decode, busy, other = ends(LAYOUT, max_peers=1), ends(LAYOUT), ends(LAYOUT)
    ask(decode, busy.remote(([2],), "a"), "a", 1)  # Not kept yet, so that its end is not known.
    step_until(lambda: connected(decode), decode, busy)
    other.keep("b", "c")
    ask(decode, other.remote(([2],), "b"), "b", 3)
    assert decode.received == {"b"} and decode.invalid == {3}
    assert "1 other engines are connected, as many as max_peers" in caplog_vllm.text
    busy.keep("a")
    step_until(lambda: "a" in decode.received, decode, busy)
    read(decode, other, ([4],), ([2],), (16,), "c")
    assert decode.invalid == {3} and len(decode.worker.peers) == 1


def test_two_shake_hands_for_one_place(ends, caplog_vllm):  # noqa: F811
    """Who comes second is refused, as long as the first has something to do."""
    decode, one, two = ends(LAYOUT, max_peers=1), ends(LAYOUT), ends(LAYOUT)
    decode.worker.peers._most_unproven = 2
    decode.step(
        reqs_to_recv={
            name: ReqMeta(([page],), (16,), end.remote(([2],), name))
            for name, page, end in (("a", 1, one), ("b", 3, two))
        }
    )
    step_until(lambda: decode.received, decode)
    assert len(decode.received) == 1 and len(connected(decode)) == 1
    assert "1 other engines are connected" in caplog_vllm.text
    for end in (one, two):
        end.keep("a", "b")
    step_until(lambda: decode.received == {"a", "b"}, decode, one, two)
    assert len(decode.invalid) == 1


def test_heartbeats_and_releases_take_free_places_only(ends, silent, caplog_vllm):  # noqa: F811
    """A thousand requests that wait name a thousand engines: few are connected to, one line says so,
    and a request that is read takes the place of one."""
    decode, prefill = ends(LAYOUT, max_peers=6), ends(LAYOUT)
    junk = [nobody(silent[0], f"e{i}") for i in range(1000)]
    beats = {each.peer_key: HeartbeatInfo(frozenset("r"), each.host, each.port) for each in junk}
    releases = {f"r{i}": each for i, each in enumerate(junk)}
    decode.step(heartbeats=beats, reqs_to_release=releases)
    assert len(decode.worker.peers) == 3
    assert caplog_vllm.text.count("releases and heartbeats are not sent") == 1
    prefill.keep("a")
    ask(decode, prefill.remote(([2],), "a"), "a", 1)
    step_until(lambda: "a" in decode.received, decode, prefill)
    assert not decode.invalid and len(decode.worker.peers) == 3


def test_a_peer_that_nobody_asks_for_is_dropped(ends):  # noqa: F811
    """And connected to again. Guards against connections that stay for ever."""
    decode, prefill = ends(LAYOUT, peer_idle_seconds=0.1), ends(LAYOUT)
    prefill.keep("a", "b")
    read(decode, prefill, ([1],), ([2],), (16,), "a")
    step_until(lambda: not len(decode.worker.peers), decode, prefill)
    read(decode, prefill, ([3],), ([4],), (16,), "b")
    assert not decode.invalid


def test_a_false_name_disturbs_nobody(ends, silent):  # noqa: F811
    """A request that names another engine at the address of one that is being read from, and one
    that named that engine at another address before. Guards against peers that are dropped, or taken
    for another, on a client's word."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    remote = prefill.remote(([2],), "a")
    ask(decode, dataclasses.replace(remote, port=silent[0]), "elsewhere", 5)
    ask(decode, remote, "a", 1)
    step_until(lambda: any(peer.is_ready for peer in decode.worker.peers), decode, prefill)
    ask(decode, dataclasses.replace(remote, engine_id="made up"), "false", 3)
    step_until(lambda: "false" in decode.received, decode, prefill)
    assert decode.invalid == {3} and "a" not in decode.received
    prefill.keep("a")
    step_until(lambda: "a" in decode.received, decode, prefill)
    assert decode.invalid == {3}


def test_one_engine_at_two_addresses(ends):  # noqa: F811
    """NIXL knows it once: that one connection is dropped must not take the other's memory away."""
    decode, prefill = ends(LAYOUT, peer_idle_seconds=0.3), ends(LAYOUT)
    prefill.keep("a", "b", "c")
    named = prefill.remote(([2],), "a")
    read(decode, prefill, ([1],), ([2],), (16,), "a")
    deadline = time.monotonic() + 0.5
    for name in "bc":
        ask(decode, dataclasses.replace(named, host="127.0.0.1", request_id=name), name, 3)
        step_until(lambda name=name: name in decode.received, decode, prefill)
        while name == "b" and time.monotonic() < deadline:
            decode.step()
            prefill.step()
    assert not decode.invalid


def test_heartbeats_go_to_where_each_request_says():
    """Two requests name one engine at two addresses. Guards against heartbeats of the second that go
    to the first's address, and a lease that ends for it."""
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    scheduler = NixlConnectorScheduler(config, "here", groups)
    for port in (1, 2):
        params = {
            "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": f"r{port}",
            "remote_host": "localhost", "remote_port": port, "remote_block_ids": [[1]],
        }  # fmt: skip
        params = SamplingParams(extra_args={"kv_transfer_params": params})
        scheduler.on_new_request(Request(f"a{port}", [1, 2], params))
    beats = scheduler.build_connector_meta().heartbeats
    assert {key.port: info.req_ids for key, info in beats.items()} == {1: {"r1"}, 2: {"r2"}}


@pytest.mark.parametrize("options", [{"max_peers": 0}, {"max_peers": 2.5}, {"max_peers": True}])
def test_a_limit_that_is_none(options):
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=options
    )
    with pytest.raises(ValueError, match="max_peers"):
        NixlOptions.from_config(config)

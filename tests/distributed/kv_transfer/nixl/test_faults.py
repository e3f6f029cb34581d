# SPDX-License-Identifier: Apache-2.0
"""Faults of every kind end the requests they concern, and no others; what is kept is let go once.
Real workers and real NIXL; only the fault itself is forced.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest
import zmq

from tests.distributed.kv_transfer.nixl.ends import (
    HEADS,
    Layout,
    Model,
    ends,  # noqa: F401
    read,
    step_until,
)
from tests.v1.worker.kv_cache_fakes import Fused, FusedNHD
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Leases
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    RemoteMeta,
    ReqMeta,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.options import NixlOptions

LAYOUT = Layout(Fused)


def ask(decode, prefill, request_id, local=(3, 1), remote=(5, 6), num_tokens=32) -> None:
    meta = ReqMeta(
        (list(local),), (num_tokens,), prefill.remote((list(remote),), request_id)
    )
    decode.step(reqs_to_recv={request_id: meta})


def test_one_exception_fails_one_request(ends, monkeypatch):  # noqa: F811
    """The second read raises; the first and the third arrive."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("a", "b", "c")
    read(decode, prefill, ([1],), ([2],), (16,), "a")
    with monkeypatch.context() as patch:

        def fail(*args):
            raise TransferError("forced")

        patch.setattr(decode.worker.agent, "read", fail)
        read(decode, prefill, ([3],), ([4],), (16,), "b")
    assert decode.invalid == {3}
    read(decode, prefill, ([5],), ([6],), (16,), "c")
    assert decode.invalid == {3} and decode.received == {"a", "b", "c"}
    step_until(lambda: prefill.sent == {"a", "b", "c"}, prefill)
    stats = decode.worker.get_kv_connector_stats().data
    assert stats["num_failed_transfers"] == 1 and len(stats["bytes_transferred"]) == 2


def test_pages_that_the_peer_does_not_have(ends):  # noqa: F811
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("a", "b")
    read(decode, prefill, ([1],), ([4000],), (16,), "a")
    read(decode, prefill, ([2],), ([1],), (16,), "b")
    assert decode.invalid == {1}


def test_nobody_is_there(ends):  # noqa: F811
    """A port that nobody listens on. Guards against requests that wait for ever."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.worker._server.close()
    ask(decode, prefill, "a")
    step_until(lambda: decode.received == {"a"}, decode)
    assert decode.invalid == {3, 1} and not decode.worker.peers
    assert decode.worker.get_kv_connector_stats().data["num_failed_handshakes"] == 1


def test_a_silent_peer(ends):  # noqa: F811
    """Somebody listens and says nothing."""
    decode = ends(LAYOUT, timeout_seconds=0.2)
    with zmq.Context.instance().socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        meta = ReqMeta(([1],), (16,), RemoteMeta(([1],), "127.0.0.1", port, "e", "a"))
        decode.step(reqs_to_recv={"a": meta})
        step_until(lambda: decode.received == {"a"}, decode)
    assert decode.invalid == {1}


def test_another_engine_is_in_its_place(ends):  # noqa: F811
    """Prefill was restarted: requests for the one before fail, those for the new one go on."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("b")
    remote = dataclasses.replace(prefill.remote(([1],), "a"), engine_id="before")
    decode.step(reqs_to_recv={"a": ReqMeta(([1],), (16,), remote)})
    step_until(lambda: decode.received == {"a"}, decode, prefill)
    assert decode.invalid == {1}
    read(decode, prefill, ([2],), ([1],), (16,), "b")
    (peer,) = decode.worker.peers
    assert decode.invalid == {1} and peer.key.engine_id == prefill.worker.engine_id


def test_state_of_a_peer_goes_when_it_goes(ends):  # noqa: F811
    """Between two requests the peer stops. Guards against reads with addresses of a dead one."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("a", "b")
    read(decode, prefill, ([1],), ([2],), (16,), "a")
    assert decode.worker.peers
    prefill.worker._server.close()
    step_until(lambda: not decode.worker.peers, decode)
    ask(decode, prefill, "b")
    step_until(lambda: "b" in decode.received, decode)
    assert decode.invalid == {3, 1}


def test_a_lease_that_ran_out(ends):  # noqa: F811
    """Prefill has freed the pages, and said so once. What decode reads afterwards is not used."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT, lease_seconds=0.05)
    prefill.step(reqs_to_send={"a": time.monotonic()})
    step_until(lambda: prefill.sent == {"a"}, prefill)
    assert prefill.worker.get_kv_connector_stats().data["num_kv_expired_reqs"] == 1
    read(decode, prefill, ([3],), ([1],), (16,), "a")
    assert decode.invalid == {3}
    prefill.step()
    assert not len(prefill.worker.leases)


def test_the_response_may_overtake_the_lease(ends):  # noqa: F811
    """Decode has read before prefill's next step: its release waits for the lease to be known."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    ask(decode, prefill, "a")
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        decode.step()
        prefill.step()
    assert not decode.received
    prefill.keep("a")
    step_until(lambda: decode.received == {"a"}, decode)
    assert not decode.invalid
    step_until(lambda: prefill.sent == {"a"}, prefill)


def test_an_abort_lets_go_on_both_ends(ends):  # noqa: F811
    """A request that is aborted before its pages were read: one is read no more, the other freed."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("a", "b")
    ask(decode, prefill, "a")
    decode.step(finished={"a"})
    step_until(lambda: "a" in decode.received and "a" in prefill.sent, decode, prefill)
    decode.step(reqs_to_release={"b": prefill.remote((), "b")})
    step_until(lambda: "b" in prefill.sent, decode, prefill)


def test_an_abort_while_the_peer_is_gone(ends):  # noqa: F811
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    ask(decode, prefill, "a")
    prefill.worker._server.close()
    decode.step(finished={"a"})
    step_until(lambda: decode.received == {"a"}, decode)


def test_peers_that_do_not_fit_are_refused_by_name(ends, caplog_vllm):  # noqa: F811
    decode = ends(LAYOUT)
    other = ends(LAYOUT, model=Model(dtype="bfloat16"))
    ask(decode, other, "a")
    step_until(lambda: "a" in decode.received, decode, other)
    assert "must be the same on both ends" in caplog_vllm.text
    twice = ends(LAYOUT, LAYOUT)
    ask(decode, twice, "b")
    step_until(lambda: "b" in decode.received, decode, twice)
    assert "layers that only one end has: layers.0.attn1" in caplog_vllm.text
    assert decode.invalid == {3, 1}


@pytest.mark.parametrize("host", ["no host", "", "*", "localhost/x"])
def test_an_address_that_is_none(ends, host):  # noqa: F811
    """Addresses come with requests. Guards against one that ends the engine."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    meta = ReqMeta(([1],), (16,), RemoteMeta(([1],), host, 1, "e", "a"))
    decode.step(reqs_to_recv={"a": meta})
    step_until(lambda: decode.received == {"a"}, decode)
    assert decode.invalid == {1}
    prefill.keep("b")
    read(decode, prefill, ([2],), ([1],), (16,), "b")
    assert decode.invalid == {1}


def test_a_peer_that_describes_what_is_no_cache(ends):  # noqa: F811
    """A handshake whose layers have no tokens. Guards against one that ends the engine."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    server = prefill.worker._server
    said = msgspec.msgpack.decode(server._metadata)
    for layer in said["layers"]:
        layer["geometry"]["dims"] = []
    server._metadata = msgspec.msgpack.encode(said)
    ask(decode, prefill, "a")
    step_until(lambda: decode.received == {"a"}, decode, prefill)
    assert decode.invalid == {3, 1}


def test_two_requests_that_name_one_of_the_peers(ends):  # noqa: F811
    """Its pages are freed when the first has read them: each is told of its own question. Guards
    against taking what the second read later for what was kept."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    prefill.keep("r")
    metas = {
        name: ReqMeta(([page],), (16,), prefill.remote(([5],), "r"))
        for name, page in (("a", 3), ("b", 1))
    }
    decode.step(reqs_to_recv=metas)
    step_until(lambda: decode.received == {"a", "b"}, decode, prefill)
    assert decode.invalid == {1}
    step_until(lambda: prefill.sent == {"r"}, prefill)


def test_junk_on_the_side_channel_harms_nobody(ends):  # noqa: F811
    """Bytes that are no message, and one too large."""
    decode, prefill = ends(LAYOUT), ends(LAYOUT)
    port = prefill.worker.get_handshake_metadata().side_channel_port
    with zmq.Context.instance().socket(zmq.DEALER) as rude:
        rude.setsockopt(zmq.LINGER, 0)
        rude.connect(f"tcp://127.0.0.1:{port}")
        for junk in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Release"}), b"x" * (17 << 20)):
            rude.send(junk)
        prefill.keep("a")
        read(decode, prefill, ([3],), ([1],), (16,), "a")
    assert not decode.invalid


def test_the_port_is_taken(ends, monkeypatch):  # noqa: F811
    prefill = ends(LAYOUT)
    port = prefill.worker.get_handshake_metadata().side_channel_port
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        ends(LAYOUT)


# The hash, leases, options


class Config:
    def __init__(self, cache_dtype="auto", block_size=16, tp=1, **model):
        self.model_config = Model(**model)
        self.cache_config = type("Cache", (), {"cache_dtype": cache_dtype, "block_size": block_size})
        self.parallel_config = type("Parallel", (), {"tensor_parallel_size": tp})


def digest(backend="A", mode="pull", **kwargs) -> str:
    return compute_nixl_compatibility_hash(Config(**kwargs), backend, False, mode)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "b"},
        {"revision": "main"},
        {"dtype": "bfloat16"},
        {"heads": HEADS + 1},
        {"head_size": 16},
        {"layers": 3},
        {"cache_dtype": "fp8"},
        {"mode": "push"},
    ],
)
def test_the_hash_changes_with_what_must_match(changed):
    assert digest(**changed) != digest()


def test_the_hash_changes_with_the_version(monkeypatch):
    before = digest()
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata.__version__", "0.0"
    )
    assert digest() != before


@pytest.mark.parametrize("changed", [{"block_size": 32}, {"tp": 2}, {"backend": "B"}])
def test_the_hash_does_not_change_with_what_is_converted(changed):
    assert digest(**changed) == digest()


def test_layouts_are_not_in_the_hash(ends):  # noqa: F811
    assert ends(LAYOUT).worker.compat_hash == ends(Layout(FusedNHD, 32, 8)).worker.compat_hash


def test_leases():
    """Each ends once: released, or expired; a heartbeat puts off the second."""
    now = [0.0]
    leases = Leases(10.0, lambda: now[0])
    assert leases.release("a") is None
    for request in "abc":
        leases.hold(request, 10.0)
    assert leases.release("a") is True and leases.release("a") is False
    now[0] = 9.0
    leases.renew(["b", "nobody"])
    now[0] = 11.0
    assert leases.take_expired() == {"c"} and leases.take_expired() == set()
    assert leases.release("c") is False and leases.release("b") is True
    assert leases.take_released() == {"a", "b"} and leases.take_released() == set()
    assert len(leases) == 0


@pytest.mark.parametrize(
    "options", [{"lease": 1}, {"lease_seconds": 0}, {"timeout_seconds": "1"}, {"progress_thread": 1}]
)
def test_options_that_make_no_sense_are_refused(options):
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=options
    )
    with pytest.raises(ValueError, match="kv_connector_extra_config"):
        NixlOptions.from_config(config)

# SPDX-License-Identifier: Apache-2.0
"""The peers that are connected: a bounded number, whatever addresses requests bring.

Who a peer is, is told by engine and address together. Requests say both, so that one which names an
engine at a wrong address, or an address with a wrong engine, has a peer of its own that comes to
nothing, and not that of others.

Until a handshake is done a peer is no more than a client's word. Such peers have places of their
own, half as many, and never take one of those that have shown what they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PeerKey, RemoteMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import Peer, PeerLost


class NoPlaceYet(PeerLost):
    """Places for handshakes are taken; there will be some."""


class Peers:
    """Those that are dropped while one iterates are passed over.

    Args:
        connect: begins a handshake.
        drop: called, with the reason, for each peer that is to be forgotten; it calls `forget`.
        most: peers at a time whose handshake is done; half as many have one under way.
        idle_seconds: after which one that nobody asks for is dropped.
        patience_seconds: after which one that has not answered makes way for the next.
    """

    def __init__(
        self,
        connect: Callable[[RemoteMeta], Peer],
        drop: Callable[[Peer, str], None],
        most: int,
        idle_seconds: float,
        patience_seconds: float,
    ) -> None:
        self._connect = connect
        self._drop = drop
        self._most = most
        self._most_unproven = max(1, most // 2)
        self._idle_seconds = idle_seconds
        self._patience_seconds = patience_seconds
        self._peers: dict[PeerKey, Peer] = {}
        self._last_used: dict[PeerKey, float] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        for key in list(self._peers):
            if key in self._peers:
                yield self._peers[key]

    def get(self, remote: RemoteMeta, may_displace: bool = False) -> Peer:
        """The peer of that engine and address, connected now if it was not.

        Args:
            may_displace: if there is no room, another that has nothing to do, or that has been
                silent for a while, is dropped.

        Raises:
            NoPlaceYet: as many handshakes as may be are under way; ask again.
            PeerLost: there are as many as may be, or no socket is left.
        """
        key = remote.peer_key
        peer = self._peers.get(key)
        if peer is not None and peer.is_suspect and not peer.receives:
            self._drop(peer, "a transfer failed")
            peer = None
        if peer is None:
            self._make_room(key, may_displace)
            try:
                peer = self._connect(remote)
            except zmq.ZMQError as error:
                raise PeerLost(f"no connection to {key} can be made: {error}") from error
            self._peers[key] = peer
        self._last_used[key] = time.monotonic()
        return peer

    def _make_room(self, key: PeerKey, may_displace: bool) -> None:
        """A place for a handshake, where one that succeeds will find its own."""
        proven = [peer for peer in self if peer.is_ready]
        if len(proven) >= self._most and not any(may_displace and peer.is_idle for peer in proven):
            raise self._full(key)
        unproven = [peer for peer in self if not peer.is_ready]
        if len(unproven) < self._most_unproven:
            return
        before = time.monotonic() - self._patience_seconds
        displaceable = [peer for peer in unproven if peer.is_idle or peer.began_at < before]
        if not may_displace or not displaceable:
            raise NoPlaceYet(
                f"{len(unproven)} handshakes are under way, half of what max_peers in "
                f"kv_connector_extra_config allows, so none with {key}"
            )
        oldest = min(displaceable, key=lambda peer: (not peer.is_idle, peer.began_at))
        self._drop(oldest, f"it has not answered yet, and its place goes to {key}")

    def _full(self, key: PeerKey) -> PeerLost:
        return PeerLost(
            f"{self._most} other engines are connected, as many as max_peers in "
            f"kv_connector_extra_config allows, so {key} is not"
        )

    def admit(self, peer: Peer) -> None:
        """`peer` has shown that it is the engine at its address: others there are gone, and another
        that has nothing to do makes way for it.

        Raises:
            PeerLost: all have something to do.
        """
        for other in self:
            if other.key.address == peer.key.address and other is not peer:
                self._drop(other, f"engine {peer.key.engine_id} is in its place")
        others = [other for other in self if other.is_ready and other is not peer]
        if len(others) < self._most:
            return
        idle = [other for other in others if peer.receives and other.is_idle]
        if not idle:
            raise self._full(peer.key)
        oldest = min(idle, key=lambda other: self._last_used[other.key])
        self._drop(oldest, f"its place goes to {peer.key}")

    def drop_idle(self) -> None:
        """Drops those that nothing is read from and that nobody has asked for lately."""
        before = time.monotonic() - self._idle_seconds
        for peer in self:
            if not peer.receives and self._last_used[peer.key] < before:
                self._drop(peer, f"nobody asked for it for {self._idle_seconds:g} s")

    def forget(self, peer: Peer) -> None:
        """`peer` is dropped."""
        self._peers.pop(peer.key, None)
        self._last_used.pop(peer.key, None)

# SPDX-License-Identifier: Apache-2.0
"""The worker's half: memory, peers, reads, leases. Nothing here waits; each step moves it on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent, TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Leases
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    PeerKey,
    RemoteMeta,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.options import NixlOptions
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import Peer, PeerLost, pair_groups
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peers import NoPlaceYet, Peers
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.receive import NotInTime, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.registration import plan_registration
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import Region
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Heartbeat,
    Released,
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import StagingBuffer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_cache_geometry import storage_bytes

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# Of a handshake's time, the part in which it need not fear to be given up for another.
_PATIENCE = 10


class NixlBaseConnectorWorker:
    """Registers the caches and reads what peers have. See `NixlConnector` for who calls what."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        self.vllm_config = vllm_config
        self.engine_id = engine_id
        self.kv_cache_config = kv_cache_config
        self.options = NixlOptions.from_config(vllm_config.kv_transfer_config)
        self.leases = Leases(self.options.lease_seconds)
        self.xfer_stats = NixlKVConnectorStats()
        self.compat_hash = compute_nixl_compatibility_hash(vllm_config, "", False)
        self.peers = Peers(
            self._connect,
            self._drop,
            self.options.max_peers,
            self.options.peer_idle_seconds,
            self.options.timeout_seconds / _PATIENCE,
        )
        self._staging: StagingBuffer | None = None
        self._server: SideChannelServer | None = None
        # Receives that wait for a place for their peer's handshake.
        self._unplaced: list[Receive] = []
        # Receives that failed but whose bytes may still arrive.
        self._draining: list[Receive] = []
        self._done_receiving: set[str] = set()
        self._invalid_pages: set[int] = set()

    # --- Start and end ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the caches and listens for peers.

        Raises:
            ValueError: a cache's pages are not where they must be (see `plan_registration`), NIXL
                is not installed, or the side channel's port is taken.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        names = [n for group in self.kv_cache_config.kv_cache_groups for n in group.layer_names]
        backends = {name: layers[name].get_attn_backend() for name in names}
        cache_dtype = self.vllm_config.cache_config.cache_dtype
        self.registration = plan_registration(
            kv_caches, self.kv_cache_config, backends, cache_dtype
        )
        self._raw = {
            name: _bytes_from(kv_caches[name], layer.base)
            for name, layer in self.registration.layers.items()
        }
        self._device = next(iter(kv_caches.values())).device
        memory = Memory.of_device(next(iter(kv_caches.values())).get_device())
        # A name of this start: peers never take it for one before.
        name = f"{self.engine_id}-{uuid.uuid4().hex[:8]}"
        self.agent = NixlAgent(name, memory, self.options.progress_thread)
        self._registered = [self.agent.register(self.registration.regions)]
        metadata = msgspec.msgpack.encode(self._metadata(memory))
        host, port = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT
        self._server = SideChannelServer(
            host, port, self.engine_id, self.compat_hash, metadata, self.leases
        )
        self._handshake = NixlHandshakePayload(self.compat_hash, metadata, self._server.port)
        logger.info(
            "NIXL: %d regions, %.1f MB, registered; side channel on %s:%d",
            len(self.registration.regions),
            sum(region.nbytes for region in self.registration.regions) / 1e6,
            host,
            self._server.port,
        )

    def _metadata(self, memory: Memory) -> NixlAgentMetadata:
        layers = [one for one in self.registration.layers.values() if one.alias_of is None]
        by_base = {layer.base: layer for layer in layers}
        regions = self.registration.regions
        return NixlAgentMetadata(
            engine_id=self.engine_id,
            agent_metadata=self.agent.metadata(),
            kv_caches_base_addr=[region.address for region in regions],
            device_id=memory.device_id,
            num_blocks=self.registration.num_blocks,
            block_lens=[by_base[region.address].geometry.payload for region in regions],
            kv_cache_layout=", ".join(sorted({str(one.geometry.memory_roles) for one in layers})),
            block_size=layers[0].geometry.tokens_per_page,
            ssm_sizes=(0, 0),
            attn_backend_name=", ".join(sorted({layer.backend for layer in layers})),
            physical_blocks_per_logical_kv_block=self._physical_blocks_per_logical_kv_block,
            layers=layers,
            mem_type=memory.mem_type,
        )

    @property
    def _physical_blocks_per_logical_kv_block(self) -> int:
        """Kernel blocks of a page, as far as the groups have that in common."""
        return self.registration.common_kernel_blocks_per_page

    def get_handshake_metadata(self) -> NixlHandshakePayload:
        """What peers get to know; there once the caches are registered."""
        return self._handshake

    def shutdown(self) -> None:
        """Forgets all peers and gives the memory back. May be called twice."""
        for peer in self.peers:
            self._drop(peer, "this engine is going down")
        if self._server is not None:
            self._server.close()
            self._server = None
            for registered in self._registered:
                self.agent.deregister(registered)

    # --- A step ---

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Takes up what the scheduler's half asks for."""
        for request_id, deadline in metadata.reqs_to_send.items():
            self.leases.hold(request_id, deadline)
        self._poll_peers()
        self._unplaced += [Receive(*each) for each in metadata.reqs_to_recv.items()]
        self._place()
        unheard: list[str] = []
        for remote in metadata.reqs_to_release.values():
            self._tell(remote, lambda peer, remote=remote: peer.release(remote.request_id), unheard)
        for key, info in metadata.heartbeats.items():
            message = Heartbeat(key.engine_id, sorted(info.req_ids))
            remote = RemoteMeta((), key.host, key.port, key.engine_id, "")
            self._tell(remote, lambda peer, message=message: peer.channel.send(message), unheard)
        if unheard:
            logger.warning(
                "NIXL: %d releases and heartbeats are not sent; their peers keep pages for "
                "lease_seconds at most: %s", len(unheard), unheard[0],
            )  # fmt: skip
        self._advance()

    def _place(self) -> None:
        """Gives receives to their peers, in order; some keep waiting."""
        receives, self._unplaced = self._unplaced, []
        for receive in receives:
            try:
                peer = self.peers.get(receive.meta.remote, may_displace=True)
            except PeerLost as error:
                waited = time.monotonic() - receive.asked_at
                if isinstance(error, NoPlaceYet) and waited < self.options.timeout_seconds:
                    self._unplaced.append(receive)
                else:
                    self._count_failure(receive, str(error), is_handshake=True)
                    self._end_unplaced(receive)
            else:
                peer.receives[receive.request_id] = receive

    def _end_unplaced(self, receive: Receive) -> None:
        self._invalid_pages |= receive.wanted_pages
        self._done_receiving.add(receive.request_id)

    def _tell(
        self, remote: RemoteMeta, tell: Callable[[Peer], None], unheard: list[str]
    ) -> None:
        """Says something to a peer for whose sake no other is dropped; notes why it was not said."""
        try:
            tell(self.peers.get(remote))
        except PeerLost as error:
            unheard.append(str(error))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose pages nobody reads any more, and those whose load has ended."""
        for peer in self.peers:
            for request_id in finished_req_ids & peer.receives.keys():
                peer.receives[request_id].is_aborted = True
        for receive in self._unplaced:
            if receive.request_id in finished_req_ids:
                self._end_unplaced(receive)
        self._unplaced = [r for r in self._unplaced if r.request_id not in finished_req_ids]
        self._poll_peers()
        self._place()
        self._advance()
        released, expired = self.leases.take_released(), self.leases.take_expired()
        if expired:
            self.xfer_stats.record_expired(len(expired))
            logger.warning(
                "NIXL: pages of %d requests were kept for %g s and not read: %s",
                len(expired), self.options.lease_seconds, ", ".join(sorted(expired)[:8]),
            )  # fmt: skip
        received, self._done_receiving = self._done_receiving, set()
        return released | expired, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of requests whose load has ended that do not hold what they should."""
        pages, self._invalid_pages = self._invalid_pages, set()
        return pages

    def get_kv_connector_stats(self) -> NixlKVConnectorStats | None:
        """What was counted since this was last called."""
        return None if self.xfer_stats.is_empty() else self.xfer_stats.take()

    # --- Peers ---

    def _connect(self, remote: RemoteMeta) -> Peer:
        pair = partial(pair_groups, self.registration, self._raw)
        seconds = self.options.timeout_seconds
        return Peer(remote, self.compat_hash, self.agent, pair, seconds)

    def _poll_peers(self) -> None:
        self.peers.drop_idle()
        for peer in self.peers:
            was_ready = peer.is_ready
            try:
                answers = peer.poll()
                if peer.is_ready and not was_ready:
                    self.peers.admit(peer)
            except PeerLost as error:
                self._drop(peer, str(error))
                continue
            for answer in answers:
                self._take_answer(peer, answer)

    def _take_answer(self, peer: Peer, answer: Released) -> None:
        receive = peer.answered(answer)
        if receive is None:
            return
        if answer.held:
            self._succeed(peer, receive)
        else:
            self._fail(peer, receive, "its pages were freed before they were read")

    def _drop(self, peer: Peer, reason: str) -> None:
        """Forgets a peer; what it was to send does not come."""
        logger.info("NIXL: %s is forgotten: %s", peer, reason)
        self.peers.forget(peer)
        for receive in list(peer.receives.values()):
            self._fail(peer, receive, reason, tell_peer=False)
        peer.close()

    # --- Reads ---

    def _advance(self) -> None:
        if not self.options.progress_thread:
            self.agent.progress()
        for receive in list(self._draining):
            if receive.cancel(self._make_staging):
                self._draining.remove(receive)
                self._done_receiving.add(receive.request_id)
        may_take_room = True
        arrived_at: dict[PeerKey, float] = {}
        for peer, receive in self._in_order():
            if peer.receives.get(receive.request_id) is not receive:
                continue  # Its peer was dropped.
            receive.wait_turn(arrived_at.get(peer.key, 0.0))
            try:
                self._advance_one(peer, receive, may_take_room)
            except PeerLost as error:
                self._drop(peer, str(error))
            except Exception as error:  # Whatever it is, it is this request's alone.
                if not isinstance(error, TransferError | NotInTime | ValueError):
                    logger.exception("NIXL: request %s", receive.request_id)
                peer.is_suspect = peer.is_suspect or isinstance(error, TransferError)
                self._fail(peer, receive, str(error))
            may_take_room = may_take_room and not receive.lacks_room
            arrived_at[peer.key] = max(arrived_at.get(peer.key, 0.0), receive.arrived_at)

    def _in_order(self) -> list[tuple[Peer, Receive]]:
        """Who came first gets room in the buffer first, from whatever peer it reads: waiting for
        room ends."""
        pairs = [(peer, receive) for peer in self.peers for receive in peer.receives.values()]
        return sorted(pairs, key=lambda pair: pair[1].asked_at)

    def _advance_one(self, peer: Peer, receive: Receive, may_take_room: bool) -> None:
        if receive.is_aborted and not receive.is_released:
            self._fail(peer, receive, "it was aborted", is_fault=False)
            return
        if not peer.is_ready:
            return
        if not receive.has_started:
            seconds = self.options.timeout_seconds
            receive.start(self.agent, peer, partial(self._make_staging, peer), seconds)
        if not receive.is_released:
            is_here = receive.advance(self.agent, peer, self._make_staging, may_take_room)
            peer.delivered_at = max(peer.delivered_at, receive.arrived_at)
            if is_here:
                receive.released()
                peer.release(receive.meta.remote.request_id, receive)
        receive.check_time(peer, self._make_staging)

    def _make_staging(self, peer: Peer | None = None) -> StagingBuffer:
        """The buffer, made for the first peer that needs one."""
        if self._staging is None:
            import torch

            largest = peer.largest_staged_block() if peer else 0
            nbytes = max(int(self.options.staging_bytes), 4 * largest)
            raw = torch.empty(nbytes, dtype=torch.int8, device=self._device)
            self._registered.append(self.agent.register([Region(raw.data_ptr(), nbytes)]))
            self._staging = StagingBuffer(raw)
        return self._staging

    def _succeed(self, peer: Peer, receive: Receive) -> None:
        del peer.receives[receive.request_id]
        if receive.nbytes:
            self.xfer_stats.record_transfer(
                receive.seconds, receive.nbytes, receive.num_descriptors
            )
        if receive.missing:
            reason = f"the peer has not all tokens of {len(receive.missing)} pages"
            self._count_failure(receive, reason, is_handshake=False)
            self._invalid_pages |= receive.missing
        self._done_receiving.add(receive.request_id)

    def _fail(
        self,
        peer: Peer,
        receive: Receive,
        reason: str,
        tell_peer: bool = True,
        is_fault: bool = True,
    ) -> None:
        """Ends a receive whose pages did not come."""
        if is_fault:
            self._count_failure(receive, reason, is_handshake=not peer.is_ready)
        del peer.receives[receive.request_id]
        self._invalid_pages |= receive.wanted_pages
        if tell_peer and not receive.is_released:
            peer.release(receive.meta.remote.request_id)
        if receive.cancel(self._make_staging):
            self._done_receiving.add(receive.request_id)
        else:
            self._draining.append(receive)

    def _count_failure(self, receive: Receive, reason: str, is_handshake: bool) -> None:
        logger.warning("NIXL: pages of request %s could not be read: %s", receive.request_id, reason)
        self.xfer_stats.record_failure(is_handshake)


def _bytes_from(kv_cache: torch.Tensor, address: int) -> torch.Tensor:
    """The cache's storage as flat int8, from `address` on."""
    raw = storage_bytes(kv_cache)
    return raw[address - raw.data_ptr() :]

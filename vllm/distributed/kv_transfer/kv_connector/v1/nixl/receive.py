# SPDX-License-Identifier: Apache-2.0
"""One request's pages on their way here.

    handshake of the peer -> reads -> all bytes are here -> Release -> Released(held) -> done

Its time runs while the peer is to do something for it and for none that came before it, and runs
anew whenever a part of that is done. While it waits for room in the staging buffer, only the time
of those runs that are to give it back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import (
    NixlAgent,
    Transfer,
    TransferError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    Pieces,
    Runs,
    match_pages,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import (
    GroupPair,
    LayerBundle,
    Peer,
    PeerLost,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import (
    StagedBlocks,
    StagingBuffer,
    split,
)

# Staged blocks go in reads of about that many bytes, so that what is converted is still in the
# CPU's last cache, or other reads are under way meanwhile. Each part takes some 50 us to start.
_STAGED_READ_BYTES = 4 << 20


class NotInTime(RuntimeError):
    """A receive has waited too long, for what says nothing of the peer's reads."""


@dataclass(frozen=True)
class _Flight:
    """A read, and what is to be converted when it has ended: (offset in the buffer, blocks)."""

    transfer: Transfer
    staged: tuple[tuple[int, StagedBlocks], ...] = ()


class Receive:
    """See the module.

    missing: pages that the peer does not have.
    lacks_room: blocks wait because the staging buffer has no room for them.
    arrived_at: when bytes last came, `time.monotonic`.
    """

    def __init__(self, request_id: str, meta: ReqMeta) -> None:
        self.request_id = request_id
        self.meta = meta
        self.asked_at = time.monotonic()
        self.has_started = False
        self.is_released = False
        self.lacks_room = False
        self.arrived_at = 0.0
        self.is_aborted = False
        self.missing: set[int] = set()
        self.nbytes = 0
        self.num_descriptors = 0
        self.started_at = 0.0
        self.seconds = 0.0
        self._patience = 0.0
        self._moved_at = 0.0
        self._turn_at = 0.0
        self._flights: list[_Flight] = []
        self._waiting: deque[StagedBlocks] = deque()

    @property
    def wanted_pages(self) -> set[int]:
        """Our pages that were to be read."""
        return {page for group in self.meta.local_block_ids for page in group if page}

    def start(
        self,
        agent: NixlAgent,
        peer: Peer,
        make_staging: Callable[[], StagingBuffer],
        seconds: float,
    ) -> None:
        """Begins to read.

        Args:
            seconds: see `check_time`.

        Raises:
            ValueError: the peer has no such pages.
            TransferError: NIXL cannot read them.
        """
        peer.check_pages(self.meta.remote)
        self.started_at = self._moved_at = time.monotonic()
        self._patience = seconds
        self.has_started = True
        direct: list[Runs] = []
        for group_id, pair in enumerate(peer.groups):
            for bundle, pieces in self._match(group_id, pair):
                if not bundle.layers[0].is_staged:
                    direct.append(bundle.runs(pieces))
                    continue
                nbytes = _check_fits(bundle, make_staging())
                for layer in bundle.layers:
                    self._waiting += split(layer, pieces, nbytes)
        if direct:
            self._read(agent, peer, Runs.concatenate(direct), ())

    def _match(self, group_id: int, pair: GroupPair) -> Iterator[tuple[LayerBundle, Pieces]]:
        """What is wanted of each bundle of layers."""
        local_pages = self.meta.local_block_ids[group_id]
        remote_pages = self.meta.remote.block_ids[pair.remote_group]
        matched: dict = {}
        for bundle in pair.bundles:
            pagings = bundle.layers[0].pagings
            if pagings not in matched:
                matched[pagings] = match_pages(
                    local_pages, remote_pages, *pagings, self.meta.num_tokens[group_id]
                )
            pieces, missing = matched[pagings]
            self.missing |= missing
            if pieces:
                yield bundle, pieces

    def advance(
        self, agent: NixlAgent, peer: Peer, make_staging, may_take_room: bool = True
    ) -> bool:
        """Converts what has arrived and reads on, no more than the buffer holds. Whether
        everything is here.

        Args:
            may_take_room: nobody who came before waits for room in the buffer.

        Raises:
            TransferError: something will not arrive.
        """
        for flight in list(self._flights):
            self._take(flight, make_staging)
        self.lacks_room = bool(self._waiting) and not may_take_room
        nbytes = 0
        while self._waiting and not self.lacks_room and nbytes < make_staging().nbytes:
            flight = self._read_staged(agent, peer, make_staging())
            if flight is None:
                self.lacks_room = True
                break
            nbytes += flight.transfer.nbytes
            self._take(flight, make_staging)  # Some networks have read when they are asked to.
        if self._flights or self._waiting:
            return False
        self.seconds = time.monotonic() - self.started_at
        return True

    def released(self) -> None:
        """The peer is asked whether the pages were kept."""
        self.is_released = True
        self._moved_at = time.monotonic()

    def wait_turn(self, until: float) -> None:
        """Until then the peer has sent bytes to those that came before."""
        self._turn_at = max(self._turn_at, until)

    def check_time(self, peer: Peer, make_staging) -> None:
        """Whether to wait on. Bytes and the peer's last answer may each take `seconds`, as told to
        `start`, from what came before. Who holds room in the buffer gives some back within that
        time, or fails; twice of it, and something is wrong with the buffer.

        Raises:
            PeerLost: bytes should have come, and none has for anybody who reads from the peer.
            TransferError: bytes should have come.
            NotInTime: an answer should have, or room in the buffer.
        """
        now, seconds = time.monotonic(), self._patience
        if self.is_released:
            if now > self._moved_at + seconds:
                raise NotInTime(f"{peer} has not said for {seconds:g} s whether they were kept")
        elif self._flights:
            if now > max(self._moved_at, self._turn_at) + seconds:
                if now > peer.delivered_at + seconds:
                    raise PeerLost(f"nothing has come from {peer} for {seconds:g} s")
                raise TransferError(f"nothing has come for {seconds:g} s")
        elif self.lacks_room:
            if now > max(self._moved_at, make_staging().changed_at) + 2 * seconds:
                raise NotInTime(f"no room in the staging buffer for {2 * seconds:g} s")

    def _take(self, flight: _Flight, make_staging) -> None:
        """Converts what a read has brought, if it has ended."""
        if not flight.transfer.is_done():
            return
        for offset, staged in flight.staged:
            staged.convert(make_staging().raw[offset : offset + staged.nbytes])
        self._end(flight, make_staging)
        self.arrived_at = self._moved_at = time.monotonic()

    def cancel(self, make_staging) -> bool:
        """Gives up. False: bytes may still arrive; ask again."""
        self._waiting.clear()
        self.lacks_room = False
        for flight in list(self._flights):
            if flight.transfer.release():
                self._end(flight, make_staging)
        return not self._flights

    def _end(self, flight: _Flight, make_staging) -> None:
        flight.transfer.release()
        self._flights.remove(flight)
        for offset, _ in flight.staged:
            make_staging().give_back(offset)

    def _read(self, agent: NixlAgent, peer: Peer, runs: Runs, staged) -> _Flight:
        transfer = agent.read(peer.agent_name, runs, peer.memory)
        flight = _Flight(transfer, tuple(staged))
        self._flights.append(flight)
        self.nbytes += transfer.nbytes
        self.num_descriptors += transfer.num_descriptors
        return flight

    def _read_staged(self, agent: NixlAgent, peer: Peer, buffer: StagingBuffer) -> _Flight | None:
        """Reads as many waiting blocks as a read should have; None if there is no room now."""
        staged, runs, nbytes = [], [], 0
        while self._waiting and nbytes < _STAGED_READ_BYTES:
            offset = buffer.take(self._waiting[0].nbytes)
            if offset is None:
                break
            blocks = self._waiting.popleft()
            staged.append((offset, blocks))
            nbytes += blocks.nbytes
            runs.append(blocks.reads(buffer.address + offset))
        if not staged:
            return None
        self._moved_at = time.monotonic()
        try:
            return self._read(agent, peer, Runs.concatenate(runs), staged)
        except Exception:
            for offset, _ in staged:
                buffer.give_back(offset)
            raise


def _check_fits(bundle: LayerBundle, buffer: StagingBuffer) -> int:
    """Bytes that blocks are to be read in.

    Raises:
        ValueError: the buffer is smaller than one block.
    """
    if bundle.layers[0].staged_block_nbytes > buffer.nbytes:
        raise ValueError(
            f"a block of {bundle.layers[0].staged_block_nbytes} bytes does not fit the staging "
            f"buffer of {buffer.nbytes}; raise staging_bytes in kv_connector_extra_config"
        )
    return min(_STAGED_READ_BYTES, buffer.nbytes // 4)

# SPDX-License-Identifier: Apache-2.0
"""One request's pages on their way here.

    handshake of the peer -> reads -> all bytes are here -> Release -> Released(held) -> done
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import NixlAgent, Transfer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    Pieces,
    Runs,
    match_pages,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import LayerPair, Peer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import (
    StagingBuffer,
    convert,
    staging_runs,
)

# Staged blocks go in reads of about that many bytes, so that one is converted while others arrive.
_STAGED_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class StagedBlocks:
    """Some of the peer's kernel blocks of one layer, and the pieces of them that are wanted."""

    pair: LayerPair
    pieces: Pieces
    blocks: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.pair.staged_block_nbytes * len(self.blocks)


@dataclass(frozen=True)
class _Flight:
    """A read, and what is to be converted when it has ended: (offset in the buffer, blocks)."""

    transfer: Transfer
    staged: tuple[tuple[int, StagedBlocks], ...] = ()


class Receive:
    """See the module. `missing`: pages that the peer does not have."""

    def __init__(self, request_id: str, meta: ReqMeta) -> None:
        self.request_id = request_id
        self.meta = meta
        self.has_started = False
        self.deadline: float | None = None
        self.is_released = False
        self.is_aborted = False
        self.missing: set[int] = set()
        self.nbytes = 0
        self.num_descriptors = 0
        self.started_at = 0.0
        self.seconds = 0.0
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

        Raises:
            ValueError: the peer has no such pages.
            TransferError: NIXL cannot read them.
        """
        peer.check_pages(self.meta.remote)
        self.started_at = time.monotonic()
        self.deadline = self.started_at + seconds
        self.has_started = True
        direct = []
        for group_id, pair in enumerate(peer.groups):
            remote_pages = self.meta.remote.block_ids[pair.remote_group]
            local_pages = self.meta.local_block_ids[group_id]
            matched: dict = {}
            for layer in pair.layers:
                if layer.pagings not in matched:
                    matched[layer.pagings] = match_pages(
                        local_pages, remote_pages, *layer.pagings, self.meta.num_tokens[group_id]
                    )
                pieces, missing = matched[layer.pagings]
                self.missing |= missing
                if pieces and layer.is_staged:
                    self._waiting += _split(layer, pieces, make_staging().nbytes)
                elif pieces:
                    direct.append(_direct_runs(layer, pieces))
        if direct:
            self._read(agent, peer, Runs.concatenate(direct), ())

    def advance(self, agent: NixlAgent, peer: Peer, make_staging) -> bool:
        """Converts what has arrived and reads on. Whether everything is here.

        Raises:
            TransferError: something will not arrive.
        """
        for flight in list(self._flights):
            if not flight.transfer.is_done():
                continue
            for offset, staged in flight.staged:
                buffer = make_staging()
                local, remote = staged.pair.local.geometry, staged.pair.remote.geometry
                raw = buffer.raw[offset : offset + staged.nbytes]
                convert(local, staged.pair.raw, remote, raw, staged.pieces, staged.blocks)
            self._end(flight, make_staging)
        while self._waiting and self._read_staged(agent, peer, make_staging()):
            pass
        if self._flights or self._waiting:
            return False
        self.seconds = time.monotonic() - self.started_at
        return True

    def cancel(self, make_staging) -> bool:
        """Gives up. False: bytes may still arrive; ask again."""
        self._waiting.clear()
        for flight in list(self._flights):
            if flight.transfer.release():
                self._end(flight, make_staging)
        return not self._flights

    def _end(self, flight: _Flight, make_staging) -> None:
        flight.transfer.release()
        self._flights.remove(flight)
        for offset, _ in flight.staged:
            make_staging().give_back(offset)

    def _read(self, agent: NixlAgent, peer: Peer, runs: Runs, staged) -> None:
        transfer = agent.read(peer.agent_name, runs, peer.memory)
        self._flights.append(_Flight(transfer, tuple(staged)))
        self.nbytes += transfer.nbytes
        self.num_descriptors += transfer.num_descriptors

    def _read_staged(self, agent: NixlAgent, peer: Peer, buffer: StagingBuffer) -> bool:
        """Reads as many waiting blocks as a read should have; False if there is no room now."""
        staged, runs, nbytes = [], [], 0
        while self._waiting and nbytes < _STAGED_READ_BYTES:
            offset = buffer.take(self._waiting[0].nbytes)
            if offset is None:
                break
            blocks = self._waiting.popleft()
            staged.append((offset, blocks))
            nbytes += blocks.nbytes
            remote = blocks.pair.remote
            to = buffer.address + offset
            runs.append(staging_runs(remote.geometry, remote.base, blocks.blocks, to))
        if not staged:
            return False
        try:
            self._read(agent, peer, Runs.concatenate(runs), staged)
        except Exception:
            for offset, _ in staged:
                buffer.give_back(offset)
            raise
        return True


def _direct_runs(pair: LayerPair, pieces: Pieces) -> Runs:
    ours, theirs = pair.local.geometry, pair.remote.geometry
    columns = []
    for local_token, remote_token, local_blocks, remote_blocks in pieces.by_tokens():
        runs = pair.runs(local_token, remote_token)
        local = pair.local.base + ours.offset + local_blocks * ours.dim("block").stride
        remote = pair.remote.base + theirs.offset + remote_blocks * theirs.dim("block").stride
        to = (local[:, None] + runs.local).reshape(-1)
        source = (remote[:, None] + runs.remote).reshape(-1)
        length = np.broadcast_to(runs.length, (len(local), len(runs.length))).reshape(-1)
        columns.append(Runs(to, source, length))
    return Runs.concatenate(columns)


def _split(pair: LayerPair, pieces: Pieces, buffer_nbytes: int) -> Iterator[StagedBlocks]:
    """Blocks in parts that a quarter of the buffer holds, or one block."""
    if pair.staged_block_nbytes > buffer_nbytes:
        raise ValueError(
            f"a block of {pair.staged_block_nbytes} bytes does not fit the staging buffer of "
            f"{buffer_nbytes}; raise staging_bytes in kv_connector_extra_config"
        )
    blocks = np.unique(pieces.remote_block)
    step = max(1, buffer_nbytes // 4 // pair.staged_block_nbytes)
    for begin in range(0, len(blocks), step):
        some = blocks[begin : begin + step]
        wanted = np.isin(pieces.remote_block, some)
        yield StagedBlocks(pair, Pieces(*(column[wanted] for column in pieces)), some)

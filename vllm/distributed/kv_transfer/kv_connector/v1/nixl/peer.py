# SPDX-License-Identifier: Apache-2.0
"""One peer: the handshake with it, and how its layers become ours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent, TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, RemoteMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    KVLayoutMismatch,
    Paging,
    Pieces,
    Runs,
    blocks_as_pages,
    check_convertible,
    one_block,
    piece_runs,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import RegisteredLayer, Registration
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Answer,
    GetMetadata,
    Handshake,
    Refused,
    Release,
    Released,
    SideChannelClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import Conversion
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.receive import Receive

logger = init_logger(__name__)

# Runs shorter than this on average are slower than to stage whole blocks and copy them.
MIN_RUN_BYTES = 8192
_SAME_GROUPS = "start both engines with the same --disable-hybrid-kv-cache-manager"
_metadata_decoder = msgspec.msgpack.Decoder(NixlAgentMetadata)


class PeerLost(RuntimeError):
    """The peer is not there, not any more, or does not fit; says why."""


@dataclass(frozen=True)
class LayerPair:
    """A layer here and there. `raw`: int8, what the local geometry's offsets count from."""

    local: RegisteredLayer
    remote: RegisteredLayer
    raw: torch.Tensor

    @cached_property
    def pagings(self) -> tuple[Paging, Paging]:
        """Here and there."""
        return Paging.of(self.local.geometry), Paging.of(self.remote.geometry)

    @cached_property
    def is_staged(self) -> bool:
        """Whether blocks are received as they are and then copied, rather than run by run."""
        ours, theirs = blocks_as_pages(self.local.geometry), blocks_as_pages(self.remote.geometry)
        if ours.digest() == theirs.digest():
            return False
        runs = piece_runs(ours, theirs, 0, 0)
        return runs.nbytes < MIN_RUN_BYTES * len(runs.length)

    @cached_property
    def staged_block_nbytes(self) -> int:
        """Bytes of one of the peer's kernel blocks."""
        return blocks_as_pages(self.remote.geometry).payload

    @cached_property
    def _conversions(self) -> dict[tuple[int, int], Conversion]:
        return {}

    def conversion(self, first: int, count: int) -> Conversion:
        """Of `count` pieces from the token `first` of a block on; made once."""
        key = first, count
        if key not in self._conversions:
            self._conversions[key] = Conversion(self, first, count)
        return self._conversions[key]


@dataclass(frozen=True)
class LayerBundle:
    """Layers of a group that differ only in where they lie, here and there."""

    layers: tuple[LayerPair, ...]

    @cached_property
    def _block_zero(self) -> tuple[np.ndarray, np.ndarray]:
        """Address of block 0 of each layer, here and there: (layers, 1)."""
        ends = [(pair.local, pair.remote) for pair in self.layers]
        bases = [[end.base + end.geometry.offset for end in both] for both in ends]
        here, there = np.asarray(bases, dtype=np.int64).T
        return here[:, None], there[:, None]

    @cached_property
    def _piece_runs(self) -> dict[tuple[int, int], Runs]:
        """Found once: each request needs them again."""
        return {}

    def runs(self, pieces: Pieces) -> Runs:
        """What to copy in all layers. Neither sorted nor merged."""
        ours, theirs = self.layers[0].local.geometry, self.layers[0].remote.geometry
        strides = ours.dim("block").stride, theirs.dim("block").stride
        columns = []
        for *tokens, local_block, remote_block in pieces.by_tokens():
            places = tuple(tokens)
            if places not in self._piece_runs:
                self._piece_runs[places] = piece_runs(ours, theirs, *places)
            piece = self._piece_runs[places]
            local = (local_block * strides[0])[:, None] + piece.local
            remote = (remote_block * strides[1])[:, None] + piece.remote
            length = np.broadcast_to(piece.length, local.shape)
            columns.append([column.reshape(-1) for column in (local, remote, length)])
        local, remote, length = (np.concatenate(column) for column in zip(*columns))
        here, there = self._block_zero
        length = np.broadcast_to(length, (len(self.layers), len(length)))
        return Runs((here + local).reshape(-1), (there + remote).reshape(-1), length.reshape(-1))


@dataclass(frozen=True)
class GroupPair:
    """A KV cache group here, the peer's number of it, and its layers."""

    remote_group: int
    layers: tuple[LayerPair, ...]

    @cached_property
    def bundles(self) -> tuple[LayerBundle, ...]:
        """The layers, those together that are laid out alike."""
        alike: dict[object, list[LayerPair]] = {}
        for pair in self.layers:
            ours, theirs = pair.local.geometry, pair.remote.geometry
            key = one_block(ours), one_block(theirs), pair.pagings
            alike.setdefault(key, []).append(pair)
        return tuple(LayerBundle(tuple(pairs)) for pairs in alike.values())


def pair_groups(
    registration: Registration,
    raw: Mapping[str, torch.Tensor],
    remote_layers: Sequence[RegisteredLayer],
) -> list[GroupPair]:
    """Matches layers by name.

    Raises:
        KVLayoutMismatch: the peer has other layers, groups them otherwise, or its pages cannot be
            converted.
    """
    theirs = {layer.name: layer for layer in remote_layers}
    num_groups = len(registration.kernel_blocks_per_page)
    ours = [layer for g in range(num_groups) for layer in registration.group_layers(g)]
    if {layer.name for layer in ours} != theirs.keys():
        odd = sorted({layer.name for layer in ours} ^ theirs.keys())
        raise KVLayoutMismatch(f"layers that only one end has: {', '.join(odd[:8])}")
    pairs = []
    for group in range(num_groups):
        layers = registration.group_layers(group)
        remote_groups = {theirs[layer.name].group for layer in layers}
        if len(remote_groups) != 1:
            raise KVLayoutMismatch(
                f"layers of group {group} ({layers[0].name}, ...) are in groups "
                f"{sorted(remote_groups)} of the peer's: {_SAME_GROUPS}"
            )
        for layer in layers:
            check_convertible(layer.name, layer.geometry, theirs[layer.name].geometry)
            _check_windows(layer, theirs[layer.name])
        matched = (LayerPair(one, theirs[one.name], raw[one.name]) for one in layers)
        pairs.append(GroupPair(remote_groups.pop(), tuple(matched)))
    if len({pair.remote_group for pair in pairs}) != num_groups:
        raise KVLayoutMismatch(f"several groups here are one of the peer's: {_SAME_GROUPS}")
    return pairs


def _check_windows(ours: RegisteredLayer, theirs: RegisteredLayer) -> None:
    """A peer keeps whole pages in which a window lies. A page of ours that begins before those could
    be had in part only, and is not to get into the prefix cache so.

    Raises:
        KVLayoutMismatch: there may be such pages.
    """
    here, there = ours.geometry.tokens_per_page, theirs.geometry.tokens_per_page
    if ours.sliding_window and there % here:
        raise KVLayoutMismatch(
            f"layer {ours.name}: with a sliding window pages there, of {there} tokens, must be whole "
            f"pages of ours, of {here}: start this engine with a --block-size that divides {there}"
        )


class Peer:
    """From the first word to the last. All calls are from the worker's thread, and none blocks.

    delivered_at: when bytes that were read last came, `time.monotonic`.

    Args:
        seconds: how long the handshake may take.
    """

    def __init__(
        self,
        remote: RemoteMeta,
        compatibility_hash: str,
        agent: NixlAgent,
        pair: Callable[[Sequence[RegisteredLayer]], list[GroupPair]],
        seconds: float,
    ) -> None:
        self.key = remote.peer_key
        self.receives: dict[str, Receive] = {}
        self.is_suspect = False
        self.is_ready = False
        self.memory = Memory()
        self.num_blocks = 0
        self.groups: list[GroupPair] = []
        self.agent_name = ""
        self._hash = compatibility_hash
        self._agent = agent
        self._pair = pair
        self.began_at = self.delivered_at = time.monotonic()
        self._deadline = self.began_at + seconds
        # What was released and not answered yet, by the peer's request id, in order: several of our
        # requests may name one of the peer's.
        self._asked: dict[str, deque[Receive | None]] = {}
        self.channel = SideChannelClient(*self.key.address)
        self.channel.send(GetMetadata(compatibility_hash, self.key.engine_id))

    def __str__(self) -> str:
        return str(self.key)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read from it, and no answer on its way."""
        return not self.receives and not (self.is_ready and self._asked)

    def poll(self) -> list[Released]:
        """Takes in what the peer has said.

        Raises:
            PeerLost: it is gone, silent, or does not fit.
        """
        answers = self.channel.receive()
        for answer in answers:
            self._take_handshake(answer)
        if self.channel.is_lost():
            raise PeerLost(f"the connection to {self} is lost")
        if not self.is_ready and time.monotonic() > self._deadline:
            raise PeerLost(f"{self} does not answer")
        return [answer for answer in answers if isinstance(answer, Released)]

    def _take_handshake(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            raise PeerLost(f"{self} refuses: {answer.reason}")
        if not isinstance(answer, Handshake) or self.is_ready:
            return
        if answer.compatibility_hash != self._hash:
            raise PeerLost(
                f"{self} does not fit: version, model, revision, dtype, KV heads, head size, "
                "--kv-cache-dtype and mode of transfer must be the same on both ends"
            )
        try:
            metadata = _metadata_decoder.decode(answer.metadata)
            if metadata.tp_size != 1:
                raise KVLayoutMismatch(f"it has {metadata.tp_size} tensor-parallel ranks, not 1")
            self.groups = self._pair(metadata.layers)
            self.memory = Memory(metadata.mem_type, metadata.device_id)
            self.num_blocks = metadata.num_blocks
            self.agent_name = self._agent.add_peer(metadata.agent_metadata)
            staged = sum(layer.is_staged for group in self.groups for layer in group.layers)
        except Exception as error:  # Whatever a peer says of itself, it harms that peer alone.
            if not isinstance(error, msgspec.MsgspecError | ValueError | TransferError):
                logger.exception("NIXL: the handshake with %s", self)
            raise PeerLost(f"{self} does not fit: {error}") from error
        self.is_ready = True
        logger.info(
            "NIXL: connected to %s: %d pages, %s; %d of %d layers are received as they are and "
            "converted", self, metadata.num_blocks, metadata.attn_backend_name, staged,
            sum(len(group.layers) for group in self.groups),
        )  # fmt: skip

    def release(self, request_id: str, receive: Receive | None = None) -> None:
        """The peer's pages of a request are needed no more. `receive` waits for the answer."""
        self._asked.setdefault(request_id, deque()).append(receive)
        self.channel.send(Release(self.key.engine_id, request_id))

    def answered(self, answer: Released) -> Receive | None:
        """What waits for this answer, and for no other; None: nothing does any more."""
        asked = self._asked.get(answer.request_id)
        receive = asked.popleft() if asked else None
        if not asked:
            self._asked.pop(answer.request_id, None)
        if receive is None or self.receives.get(receive.request_id) is not receive:
            return None
        return receive

    def close(self) -> None:
        """Forgets the peer."""
        self.channel.close()
        if self.agent_name:
            try:
                self._agent.remove_peer(self.agent_name)
            except Exception as error:
                logger.debug("NIXL: %s was gone already: %s", self, error)
            self.agent_name = ""

    def check_pages(self, remote: RemoteMeta) -> None:
        """Raises:
        ValueError: the peer has no such groups or pages.
        """
        if len(remote.block_ids) != len(self.groups):
            raise ValueError(
                f"pages of {len(remote.block_ids)} groups; {self} has {len(self.groups)}"
            )
        worst = max((page for group in remote.block_ids for page in group), default=0)
        if worst >= self.num_blocks:
            raise ValueError(f"page {worst}; {self} has {self.num_blocks}")

    def largest_staged_block(self) -> int:
        """Bytes; 0: nothing is staged."""
        layers = (layer for group in self.groups for layer in group.layers)
        return max((one.staged_block_nbytes for one in layers if one.is_staged), default=0)

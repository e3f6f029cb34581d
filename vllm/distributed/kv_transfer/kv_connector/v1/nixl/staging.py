# SPDX-License-Identifier: Apache-2.0
"""Pages of another layout: received as they are, then copied between two views.

Where runs would be short - a few bytes for each token and head - many small reads are slow. Then
kernel blocks of the peer's are read into a buffer, one behind the other, and their K and V, seen as
(block, token, head, element), are copied into ours, seen the same way. Of a block of which only
some tokens are wanted only those are read: what moves is what is wanted, to the byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    Pieces,
    Runs,
    blocks_as_pages,
    piece_tokens,
)
from vllm.v1.kv_cache_geometry import Dim, KVCacheGeometry, Part
from vllm.v1.kv_cache_geometry.tensors import strided

if TYPE_CHECKING:
    import torch

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import LayerPair


class Conversion:
    """Tokens `[first, first + count * tokens)` of a kernel block of a peer's layer, and the copy of
    them into ours. Made once for each layer: requests come by the thousand.

    tokens: of a piece.
    """

    def __init__(self, pair: LayerPair, first: int, count: int) -> None:
        ours, theirs = blocks_as_pages(pair.local.geometry), blocks_as_pages(pair.remote.geometry)
        self.tokens = piece_tokens(ours, theirs)
        remote = theirs.restrict(tokens=(first, first + count * self.tokens))
        self.nbytes = remote.payload
        self._offsets, self._lengths = np.asarray(remote.page_runs(0), dtype=np.int64).T
        self._within = np.cumsum(self._lengths) - self._lengths
        self._base, self._pitch = pair.remote.base, theirs.pitch
        sides = list(_sides(ours, staged_geometry(remote, 1)))
        self._into = [mine.view(pair.raw, mine.dims[1].size) for mine, _ in sides]
        self._staged = [other for _, other in sides]

    def reads(self, blocks: np.ndarray, to: int) -> Runs:
        """What is to be read to address `to`, neither sorted nor merged."""
        number = np.arange(len(blocks), dtype=np.int64)
        local = to + number[:, None] * self.nbytes + self._within
        theirs = self._base + blocks[:, None] * self._pitch + self._offsets
        length = np.broadcast_to(self._lengths, local.shape)
        return Runs(local.reshape(-1), theirs.reshape(-1), length.reshape(-1))

    def copy(self, staged_raw: torch.Tensor, num_blocks: int, steps: list[_Step]) -> None:
        """Copies from what `reads` has put into `staged_raw` (int8) into the cache itself."""
        for into, staged in zip(self._into, self._staged):
            source = staged.view(staged_raw, num_blocks)
            for there, here in steps:
                into[there].copy_(source[here])


_Step = tuple[tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True)
class StagedBlocks:
    """Some of the peer's kernel blocks of one layer, int64 (n,), as far as `conversion` wants them.

    local_block, local_token: where each piece belongs, int64 (n, pieces of a block).
    """

    conversion: Conversion
    blocks: np.ndarray
    local_block: np.ndarray
    local_token: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer."""
        return self.conversion.nbytes * len(self.blocks)

    def reads(self, to: int) -> Runs:
        """See `Conversion`."""
        return self.conversion.reads(self.blocks, to)

    def convert(self, staged_raw: torch.Tensor) -> None:
        """See `Conversion.copy`."""
        self.conversion.copy(staged_raw, len(self.blocks), list(self._steps()))

    def _steps(self) -> Iterator[_Step]:
        """Copies that need no more than a slice of blocks and of tokens on both ends."""
        tokens = self.conversion.tokens
        for piece, (blocks, places) in enumerate(zip(self.local_block.T, self.local_token.T)):
            theirs = slice(piece * tokens, (piece + 1) * tokens)
            for place in set(places.tolist()):
                number = np.flatnonzero(places == place)
                mine = slice(place, place + tokens)
                for into, source in arithmetic_runs(blocks[number], number):
                    yield (slice(None), into, mine), (slice(None), source, theirs)


def split(pair: LayerPair, pieces: Pieces, nbytes: int) -> Iterator[StagedBlocks]:
    """All `pieces`, in parts of up to `nbytes`, or of one block.

    Raises:
        ValueError: a block does not fit.
    """
    tokens = piece_tokens(pair.local.geometry, pair.remote.geometry)
    per_block = pair.pagings[1].tokens_per_block // tokens
    place = pieces.remote_block * per_block + pieces.remote_token // tokens
    order = np.argsort(place, kind="stable")
    place, local_block, local_token = place[order], *(column[order] for column in pieces[:2])
    begins = np.ones(len(place), dtype=bool)
    begins[1:] = (place[1:] != place[:-1] + 1) | (place[1:] % per_block == 0)
    starts = np.flatnonzero(begins)
    counts = np.diff(starts, append=len(place))
    # Which tokens of a block are wanted: of most, all; of the first and the last, some.
    kinds = place[starts] % per_block * (per_block + 1) + counts
    for kind in np.unique(kinds).tolist():
        first, count = divmod(kind, per_block + 1)
        chosen = starts[kinds == kind]
        step = max(1, nbytes * per_block // (pair.staged_block_nbytes * count))
        for begin in range(0, len(chosen), step):
            some = chosen[begin : begin + step]
            rows = some[:, None] + np.arange(count)
            blocks = place[some] // per_block
            conversion = pair.conversion(first * tokens, count)
            yield StagedBlocks(conversion, blocks, local_block[rows], local_token[rows])


def arithmetic_runs(into: np.ndarray, source: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Pairs of equally long slices that take `source[i]` to `into[i]`, for every i once. Pages of a
    request mostly follow one another; any others go two by two at best.

    Args:
        into, source: int64 (n,), each without repetition, none negative.
    """
    order = np.argsort(into, kind="stable")
    to, got = into[order].tolist(), source[order].tolist()
    begin = 0
    while begin < len(to):
        end, steps = begin + 1, (1, 1)
        if end < len(to) and got[end] > got[begin]:
            steps = to[end] - to[begin], got[end] - got[begin]
            while end < len(to) and (to[end] - to[end - 1], got[end] - got[end - 1]) == steps:
                end += 1
        yield (
            slice(to[begin], to[end - 1] + 1, steps[0]),
            slice(got[begin], got[end - 1] + 1, steps[1]),
        )
        begin = end


def staged_geometry(remote: KVCacheGeometry, num_blocks: int) -> KVCacheGeometry:
    """`num_blocks` kernel blocks of the peer's, the bytes of each in their order there, one block
    behind the other."""
    roles = remote.roles
    block = roles.index("block")
    shape = [num_blocks if d == block else dim.size for d, dim in enumerate(remote.dims)]
    slow_to_fast = [roles.index(role) for role in remote.memory_roles]
    order = [block, *(d for d in slow_to_fast if d != block)]
    return KVCacheGeometry.plan(
        roles, shape, order, remote.dtype, num_blocks, fields=remote.fields
    )


@dataclass(frozen=True)
class _Side:
    """Parts that are alike and equally far from one another, K and V: (part, block, token, ...)."""

    dtype: str
    offset: int
    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, parts: list[Part]) -> _Side:
        first = parts[0]
        apart = parts[-1].offset - first.offset
        outer = [dim for role in ("block", "token") for dim in first.dims if dim.role == role]
        rest = [dim for dim in first.dims if dim not in outer]
        return cls(first.dtype, first.offset, (Dim("kv", len(parts), apart), *outer, *rest))

    def view(self, raw: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks`, over the bytes of `raw`."""
        kv, block, *rest = self.dims
        dims = (kv, Dim("block", num_blocks, block.stride), *rest)
        return strided(raw, self.dtype, dims, self.offset)


def _sides(ours: KVCacheGeometry, theirs: KVCacheGeometry) -> Iterator[tuple[_Side, _Side]]:
    """Parts by name, on both ends: two that are alike on both at once, since each copy takes its
    time to start."""
    remote = {part.name: part for part in theirs.parts}
    alike: dict[object, list[tuple[Part, Part]]] = {}
    for part in ours.parts:
        other = remote[part.name]
        alike.setdefault((part.dtype, part.dims, other.dims), []).append((part, other))
    for pairs in alike.values():
        mine, other = ([pair[end] for pair in pairs] for end in (0, 1))
        if len(pairs) == 2 and all(b.offset > a.offset for a, b in (mine, other)):
            yield _Side.of(mine), _Side.of(other)
        else:
            yield from ((_Side.of([one]), _Side.of([two])) for one, two in pairs)


class StagingBuffer:
    """Registered memory, given out in pieces. First fit; few pieces at a time.

    changed_at: when something was last taken or given back, `time.monotonic`.
    """

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        self.address = raw.data_ptr()
        self._taken: dict[int, int] = {}
        self.changed_at = time.monotonic()

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.raw.numel()

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes`, on a boundary of 64; None: not now."""
        start = 0
        for offset in sorted(self._taken):
            if offset - start >= nbytes:
                break
            start = -(-(offset + self._taken[offset]) // 64) * 64
        if start + nbytes > self.nbytes:
            return None
        self._taken[start] = nbytes
        self.changed_at = time.monotonic()
        return start

    def give_back(self, offset: int) -> None:
        """Ends what `take` gave."""
        del self._taken[offset]
        self.changed_at = time.monotonic()

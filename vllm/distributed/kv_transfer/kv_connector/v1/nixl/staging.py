# SPDX-License-Identifier: Apache-2.0
"""Pages of another layout: received as they are, then copied between two views.

Where runs would be short - a few bytes for each token and head - many small reads are slow. Then
whole kernel blocks of the peer's are read into a buffer, one behind the other, and their K and V,
seen as (block, token, head, element), are copied into ours, seen the same way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    Pieces,
    Runs,
    blocks_as_pages,
)
from vllm.v1.kv_cache_geometry import Dim, KVCacheGeometry

if TYPE_CHECKING:
    import torch


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


def staging_runs(remote: KVCacheGeometry, remote_base: int, blocks: np.ndarray, to: int) -> Runs:
    """Reads of whole kernel blocks to address `to`.

    Args:
        remote: its offsets count from `remote_base`, an address.
        blocks: of the peer's kernel blocks, in the order they are to lie in.
    """
    geometry = blocks_as_pages(remote)
    offsets, lengths = np.asarray(geometry.page_runs(0), dtype=np.int64).T
    within = np.cumsum(lengths) - lengths
    number = np.arange(len(blocks), dtype=np.int64)
    local = to + number[:, None] * geometry.payload + within
    theirs = remote_base + blocks[:, None] * geometry.pitch + offsets
    length = np.broadcast_to(lengths, local.shape)
    return Runs.merge(local.reshape(-1), theirs.reshape(-1), length.reshape(-1))


def convert(
    local: KVCacheGeometry,
    local_raw: torch.Tensor,
    remote: KVCacheGeometry,
    staged_raw: torch.Tensor,
    pieces: Pieces,
    blocks: np.ndarray,
) -> None:
    """Copies `pieces` from staged blocks into the cache itself.

    Args:
        local_raw: int8, what `local`'s offsets count from.
        staged_raw: int8, the blocks that `staging_runs` has put there.
        blocks: those of the peer's blocks, ascending.
    """
    import torch

    ours, theirs = blocks_as_pages(local), staged_geometry(remote, len(blocks))
    tokens = math.gcd(ours.tokens_per_page, theirs.tokens_per_page)

    def index(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(local_raw.device)

    into = index(pieces.local_block), index(pieces.local_token // tokens)
    source = (
        index(np.searchsorted(blocks, pieces.remote_block)),
        index(pieces.remote_token // tokens),
    )
    for part in ours.parts:
        to = _by_token(ours.part(local_raw, part.name), part.dims)
        got = _by_token(theirs.part(staged_raw, part.name), part.dims)
        to = to.unflatten(1, (-1, tokens))
        to[into] = got.unflatten(1, (-1, tokens))[source]


def _by_token(view: torch.Tensor, dims: tuple[Dim, ...]) -> torch.Tensor:
    """(block, token, ...)."""
    roles = [dim.role for dim in dims]
    return view.movedim((roles.index("block"), roles.index("token")), (0, 1))


class StagingBuffer:
    """Registered memory, given out in pieces. First fit; few pieces at a time."""

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw
        self.address = raw.data_ptr()
        self._taken: dict[int, int] = {}

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
        return start

    def give_back(self, offset: int) -> None:
        """Ends what `take` gave."""
        del self._taken[offset]

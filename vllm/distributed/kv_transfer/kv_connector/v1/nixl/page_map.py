# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a peer's pages belong where in ours.

Both ends cut pages into kernel blocks, of possibly different sizes, layouts and storage. The largest
piece of tokens that lies in one block on both ends, their greatest common divisor, is what is
matched. With pages of 16 tokens here and of 32 there:

    here    |  page 3   |  page 9   |  page 4   |        piece: 16 tokens
    there   |        page 7         |   page 2 ...

In a piece each element (part, token, head, content) has a place on both ends. Elements that follow
one another on both are one run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_geometry import Dim, KVCacheGeometry, Part

# Of a page of a peer's; a description of more is refused, not computed.
MAX_ELEMENTS_PER_BLOCK = 1 << 26


class KVLayoutMismatch(ValueError):
    """A peer's pages cannot become ours; says of which layer, and why."""


class Runs(NamedTuple):
    """Copies: `length[i]` bytes from `remote[i]` to `local[i]`. int64, sorted by `local`."""

    local: np.ndarray
    remote: np.ndarray
    length: np.ndarray

    @classmethod
    def merge(cls, local: np.ndarray, remote: np.ndarray, length: np.ndarray) -> Runs:
        """Sorted; what follows one another on both ends as one."""
        order = np.argsort(local, kind="stable")
        local, remote, length = local[order], remote[order], length[order]
        begins = np.ones(len(local), dtype=bool)
        begins[1:] = (local[1:] != local[:-1] + length[:-1]) | (
            remote[1:] != remote[:-1] + length[:-1]
        )
        starts = np.flatnonzero(begins)
        return cls(local[starts], remote[starts], np.add.reduceat(length, starts))

    @classmethod
    def concatenate(cls, many: Sequence[Runs]) -> Runs:
        """All of them, merged."""
        if not many:
            nothing = np.empty(0, dtype=np.int64)
            return cls(nothing, nothing, nothing)
        return cls.merge(*(np.concatenate(column) for column in zip(*many)))

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())


class Pieces(NamedTuple):
    """Pieces of a request's tokens: the kernel block of each and the token it begins with, on both
    ends. int64."""

    local_block: np.ndarray
    local_token: np.ndarray
    remote_block: np.ndarray
    remote_token: np.ndarray

    def __bool__(self) -> bool:
        return len(self.local_block) > 0

    def by_tokens(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(first token in the local block, in the remote block, local blocks, remote blocks)."""
        places = (self.local_token << 32) + self.remote_token
        if (places == places[:1]).all():  # One, as a rule: kernel blocks of equal size.
            distinct = places[:1]
        else:
            distinct = np.unique(places)
        for place in distinct:
            local, remote = divmod(int(place), 1 << 32)
            if len(distinct) == 1:
                yield local, remote, self.local_block, self.remote_block
            else:
                here = places == place
                yield local, remote, self.local_block[here], self.remote_block[here]


@dataclass(frozen=True)
class Paging:
    """Tokens of a page and of a kernel block, of one group on one end."""

    tokens_per_page: int
    tokens_per_block: int

    @classmethod
    def of(cls, geometry: KVCacheGeometry) -> Paging:
        """That of a layer."""
        return cls(geometry.tokens_per_page, geometry.dim("token").size)


def match_pages(
    local_pages: Sequence[int],
    remote_pages: Sequence[int],
    local: Paging,
    remote: Paging,
    num_tokens: int,
) -> tuple[Pieces, set[int]]:
    """The pieces to be copied, and the local pages that the peer has not all tokens of.

    Args:
        local_pages: of the request, in the order of its tokens; 0 where nothing is to be loaded.
        remote_pages: as the peer has them; 0 where it has none (any more).
        num_tokens: tokens from the first page's first on that are needed; pieces behind them are
            left alone.
    """
    tokens = math.gcd(local.tokens_per_block, remote.tokens_per_block)
    last = min(num_tokens, len(local_pages) * local.tokens_per_page)
    start = np.arange(0, last, tokens, dtype=np.int64)
    ours = np.asarray([*local_pages, 0], dtype=np.int64)[start // local.tokens_per_page]
    # One more, for tokens behind the peer's last page.
    theirs = np.asarray([*remote_pages, 0], dtype=np.int64)
    theirs = theirs[np.minimum(start // remote.tokens_per_page, len(remote_pages))]
    chosen = ours != 0
    missing = set(ours[chosen & (theirs == 0)].tolist())
    if missing:
        chosen &= ~np.isin(ours, list(missing))
    if not chosen.all():
        start, ours, theirs = start[chosen], ours[chosen], theirs[chosen]
    here, there = _places(ours, start, local), _places(theirs, start, remote)
    return Pieces(*here, *there), missing


def _places(
    pages: np.ndarray, start: np.ndarray, paging: Paging
) -> tuple[np.ndarray, np.ndarray]:
    """Kernel blocks of tokens that lie in these pages, and the places in them."""
    token = start % paging.tokens_per_block
    per_page = paging.tokens_per_page // paging.tokens_per_block
    if per_page == 1:
        return pages, token
    return pages * per_page + start % paging.tokens_per_page // paging.tokens_per_block, token


def piece_tokens(local: KVCacheGeometry, remote: KVCacheGeometry) -> int:
    """Tokens of a piece."""
    return math.gcd(local.dim("token").size, remote.dim("token").size)


def blocks_as_pages(geometry: KVCacheGeometry) -> KVCacheGeometry:
    """The same cache with each kernel block as a page of its own."""
    num_blocks = geometry.num_pages * geometry.kernel_blocks_per_page
    return dataclasses.replace(geometry, num_pages=num_blocks, kernel_blocks_per_page=1)


def check_convertible(layer: str, local: KVCacheGeometry, remote: KVCacheGeometry) -> None:
    """Raises:
    KVLayoutMismatch: `remote`'s pages cannot become `local`'s.
    """
    for geometry in (local, remote):
        elements = math.prod(dim.size for dim in geometry.dims if dim.role != "block")
        if elements > MAX_ELEMENTS_PER_BLOCK:
            raise KVLayoutMismatch(f"layer {layer}: a block of {elements} elements")
    if blocks_as_pages(local).digest() == blocks_as_pages(remote).digest():
        return
    ours, theirs = _signature(local), _signature(remote)
    if not ours or not theirs:
        reason = "what the content holds is not known"
    elif ours != theirs:
        reason = f"ours holds {_words(ours)}, the peer's {_words(theirs)}"
    else:
        return
    raise KVLayoutMismatch(
        f"layer {layer}: the peer's pages cannot be converted: {reason}. Ours: "
        f"{local.describe()}; the peer's: {remote.describe()}"
    )


def _signature(geometry: KVCacheGeometry) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """What a token is made of: part -> (dtype, heads, shape)."""
    return {part.name: (part.dtype, _heads(part), _shape(part)) for part in geometry.parts}


def _words(signature: dict[str, tuple[str, int, tuple[int, ...]]]) -> str:
    return ", ".join(
        f"{name} of {heads} heads of {'x'.join(map(str, shape))} {dtype}"
        for name, (dtype, heads, shape) in signature.items()
    )


def _heads(part: Part) -> int:
    return math.prod(dim.size for dim in part.dims if dim.role == "head")


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(dim.size for dim in part.dims if dim.role == "content")


def piece_runs(
    local: KVCacheGeometry, remote: KVCacheGeometry, local_token: int, remote_token: int
) -> Runs:
    """What to copy for one piece, counted from the start of the kernel block on both ends. The
    geometries must be convertible; where they lie does not matter."""
    return _piece_runs(one_block(local), one_block(remote), local_token, remote_token)


def one_block(geometry: KVCacheGeometry) -> KVCacheGeometry:
    """One kernel block at byte 0: equal for all layers that are laid out alike."""
    stride = geometry.dim("block").stride
    dims = tuple(Dim("block", 1, stride) if d.role == "block" else d for d in geometry.dims)
    return dataclasses.replace(geometry, dims=dims, offset=0, num_pages=1, kernel_blocks_per_page=1)


@lru_cache(maxsize=256)
def _piece_runs(
    local: KVCacheGeometry, remote: KVCacheGeometry, local_token: int, remote_token: int
) -> Runs:
    if local.digest() == remote.digest():
        return _same_runs(local.page_runs(0), remote.page_runs(0))
    tokens = piece_tokens(local, remote)
    theirs = {part.name: part for part in remote.parts}
    columns = []
    for part in local.parts:
        other = theirs[part.name]
        atom = math.gcd(_dense_bytes(part), _dense_bytes(other))
        ours = _offsets(part, local_token, tokens, atom)
        columns.append((ours, _offsets(other, remote_token, tokens, atom), np.full_like(ours, atom)))
    return Runs.merge(*(np.concatenate(column) for column in zip(*columns)))


def _same_runs(local: list[tuple[int, int]], remote: list[tuple[int, int]]) -> Runs:
    """Bytes in the same order on both ends, split where either is."""
    ends = sorted({*np.cumsum([n for _, n in local]), *np.cumsum([n for _, n in remote])})
    starts = np.asarray([0, *ends[:-1]], dtype=np.int64)
    length = np.asarray(ends, dtype=np.int64) - starts
    return Runs.merge(_seek(local, starts), _seek(remote, starts), length)


def _seek(runs: list[tuple[int, int]], positions: np.ndarray) -> np.ndarray:
    """Offsets of the bytes at `positions` of what the runs hold."""
    offsets, lengths = np.asarray(runs, dtype=np.int64).T
    begins = np.cumsum(lengths) - lengths
    index = np.searchsorted(begins, positions, side="right") - 1
    return offsets[index] + positions - begins[index]


def _dense_bytes(part: Part) -> int:
    """Bytes of one token and head that follow one another."""
    nbytes = get_dtype_size(part.dtype)
    for dim in reversed([dim for dim in part.dims if dim.role == "content"]):
        if dim.size > 1 and dim.stride != nbytes:
            break
        nbytes *= dim.size
    return nbytes


def _offsets(part: Part, first_token: int, num_tokens: int, atom: int) -> np.ndarray:
    """Of each atom of the piece: by token, head, content."""
    offsets = np.full(1, part.offset, dtype=np.int64)
    inner = get_dtype_size(part.dtype)
    for dim in part.dims:
        if dim.role == "block":
            continue
        index = np.arange(dim.size, dtype=np.int64)
        if dim.role == "token":
            index = np.arange(first_token, first_token + num_tokens, dtype=np.int64)
        offsets = (offsets[:, None] + index * dim.stride).reshape(-1)
    return offsets.reshape(-1, atom // inner)[:, 0]

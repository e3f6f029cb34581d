# SPDX-License-Identifier: Apache-2.0
"""Pages read through NIXL from registered memory, for each pair of geometries: what arrives is what
was there, token for token; nothing else changes; the bytes that moved are those the pages own.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.distributed.kv_transfer.nixl.ends import (
    HEAD_SIZE,
    HEADS,
    NUM_PAGES,
    Layout,
    make_end,
    read,
)
from tests.v1.kv_cache_layouts import HND, blocks_first, fused, kv_first
from tests.v1.worker.kv_cache_fakes import BlocksFirst, BlocksFirstHND, Fused, FusedNHD, KVFirst
from vllm.distributed.kv_transfer.kv_connector.utils import head_slices, heads_of_rank
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import Runs, piece_runs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import Region

BACKENDS = [KVFirst, BlocksFirst, BlocksFirstHND, Fused, FusedNHD]
SLOW = pytest.mark.slow
PAGINGS = [
    ((16, 16), (16, 16)),
    pytest.param(((16, 16), (32, 32)), marks=SLOW),
    pytest.param(((32, 32), (16, 16)), marks=SLOW),
    pytest.param(((32, 8), (16, 16)), marks=SLOW),
]
PAGES = [5, 2, 7, 1, 9]
request_numbers = itertools.count()


@pytest.fixture(scope="module")
def pool():
    """Ends by layouts: agents take a while to make, and serve any number of requests."""
    made = {}

    def get(side: str, *layouts: Layout, **kwargs):
        key = side, layouts, tuple(kwargs.items())
        if key not in made:
            made[key] = make_end(*layouts, seed=len(made), **kwargs)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
        yield get
    for end in made.values():
        end.worker.shutdown()


def transfer(decode, prefill, local, remote, num_tokens) -> int:
    """Reads a request whose pages prefill keeps; the bytes that moved, by the metrics."""
    request_id = f"r{next(request_numbers)}"
    prefill.keep(request_id)
    read(decode, prefill, local, remote, num_tokens, request_id)
    prefill.step()
    assert request_id in prefill.sent and not decode.invalid
    stats = decode.worker.get_kv_connector_stats().data
    assert stats["num_failed_transfers"] == stats["num_failed_handshakes"] == 0
    [nbytes] = stats["bytes_transferred"]
    return nbytes


def same_tokens(decode, prefill, name, local, remote, num_tokens) -> None:
    mine, theirs = decode.tokens(name, local, num_tokens), prefill.tokens(name, remote, num_tokens)
    for one, other in zip(mine, theirs):
        assert torch.equal(one, other) and one.abs().sum() > 0


def snapshot(end) -> dict[str, torch.Tensor]:
    layers = end.worker.registration.layers
    return {
        name: layers[name].geometry.page_view(end.worker._raw[name]).clone() for name in layers
    }


def unchanged_pages(end, before, written: set[int]) -> None:
    after = snapshot(end)
    for name, pages in before.items():
        for page in set(range(NUM_PAGES)) - written:
            assert torch.equal(after[name][page], pages[page]), f"page {page} of {name} changed"


@pytest.mark.parametrize("here", BACKENDS)
@pytest.mark.parametrize("there", BACKENDS)
@pytest.mark.parametrize("paging", PAGINGS)
def test_each_pair_of_geometries(pool, here, there, paging):
    decode, prefill = pool("decode", Layout(here, *paging[0])), pool("pre", Layout(there, *paging[1]))
    num_tokens = 45
    local = PAGES[: -(-num_tokens // paging[0][0])]
    remote = PAGES[::-1][: -(-num_tokens // paging[1][0])]
    piece = math.gcd(paging[0][1], paging[1][1])
    whole_pieces = -(-num_tokens // piece) * piece
    before = snapshot(decode)
    moved = transfer(decode, prefill, (local,), (remote,), (num_tokens,))
    for name in decode.key_value:
        same_tokens(decode, prefill, name, local, remote, whole_pieces)
    unchanged_pages(decode, before, set(local))
    assert moved == whole_pieces * prefill.page_bytes([1]) // paging[1][0]


@pytest.mark.parametrize("there", [KVFirst, FusedNHD])
def test_pages_in_the_prefix_cache_are_not_read(pool, there):
    """0 stands where nothing is to be read: neither bytes nor writes for those, though half of the
    peer's first page is read."""
    decode, prefill = pool("decode", Layout(Fused)), pool("pre", Layout(there, 32, 32))
    before = snapshot(decode)
    moved = transfer(decode, prefill, ([0, 4, 6],), ([3, 8],), (48,))
    assert moved == decode.page_bytes([4, 6])
    for name in decode.key_value:
        mine, theirs = decode.tokens(name, [4, 6], 32), prefill.tokens(name, [3, 8], 48)
        assert all(torch.equal(one, other[16:]) for one, other in zip(mine, theirs))
    unchanged_pages(decode, before, {4, 6})


MIXES = {
    "kv_first_beside_blocks_first": (Layout(KVFirst), Layout(BlocksFirst)),
    "kv_first_beside_hnd": (Layout(KVFirst), Layout(BlocksFirstHND)),
    "kv_first_beside_fused": (Layout(KVFirst), Layout(FusedNHD)),
    "unequal_ratios": (Layout(FusedNHD, 16, 16), Layout(FusedNHD, 16, 4)),
}


@pytest.mark.parametrize("here", MIXES)
@pytest.mark.parametrize("there", MIXES)
def test_two_groups_over_one_allocation(pool, here, there):
    """K/V-first self-attention and restrided cross-attention, or full attention with r = 1 beside
    a window with r = 4: both groups of a request travel, each to its own pages."""
    decode, prefill = pool("decode", *MIXES[here]), pool("pre", *MIXES[there])
    local, remote, num_tokens = ([3, 1], [5, 2, 4]), ([8, 6], [1, 9, 2]), (20, 40)
    before = snapshot(decode)
    moved = transfer(decode, prefill, local, remote, num_tokens)
    for name in decode.key_value:
        group_id = int(name[-1])
        pages = local[group_id], remote[group_id]
        same_tokens(decode, prefill, name, *pages, num_tokens[group_id])
    unchanged_pages(decode, before, {1, 2, 3, 4, 5})
    expected = 0
    for group_id, num in enumerate(num_tokens):
        sides = MIXES[here][group_id], MIXES[there][group_id]
        piece = math.gcd(*(side.tokens_per_block for side in sides))
        page = prefill.page_bytes([1], group_id)
        expected += -(-num // piece) * piece * page // sides[1].tokens_per_page
    assert moved == expected


def test_mixed_storage_is_two_runs_a_page_for_both_groups(pool):
    decode = pool("decode", *MIXES["kv_first_beside_blocks_first"])
    plan = decode.worker.registration
    assert len(plan.regions) == 2, "one for each allocation, however many layers share it"
    for page in range(NUM_PAGES):
        runs = plan.page_runs(0, page)
        assert runs == plan.page_runs(1, page) and len(runs) == 2 * 2


def test_four_pieces_of_4_tokens_into_pages_of_16(pool):
    """HND on both ends. The cache itself changes, element by element, not a copy of it."""
    decode, prefill = pool("decode", Layout(Fused)), pool("pre", Layout(Fused, 4, 4))
    pieces = [9, 2, 7, 4]
    transfer(decode, prefill, ([6],), (pieces,), (16,))
    for name, cache in decode.caches.items():
        theirs = prefill.caches[name]
        for head, token, element in itertools.product(*map(range, (HEADS, 16, 2 * HEAD_SIZE))):
            source = theirs[pieces[token // 4], head, token % 4, element]
            assert cache[6, head, token, element] == source != 0


def test_peers_of_unequal_numbers_of_pages(pool):
    """111488 pages here and 111680 there, and the other way round: the last page of each can be read
    and written, and one that the smaller end lacks cannot be asked for."""
    one_token = Layout(KVFirst, 1, 1)
    more = pool("more", one_token, num_pages=111680)
    fewer = pool("fewer", one_token, num_pages=111488)
    for decode, prefill in ((fewer, more), (more, fewer)):
        local, remote = [decode.num_pages - 1, 1], [prefill.num_pages - 1, 2]
        transfer(decode, prefill, (local,), (remote,), (2,))
        for name in decode.key_value:
            same_tokens(decode, prefill, name, local, remote, 2)
    read(more, fewer, ([5],), ([fewer.num_pages],), (1,), "behind the last page")
    assert more.invalid == {5}


@pytest.mark.parametrize("here", [KVFirst, Fused])
@pytest.mark.parametrize("there", [BlocksFirstHND, FusedNHD])
def test_a_staging_buffer_smaller_than_the_request(pool, here, there):
    """Many rounds through it. Guards against parts that overtake or overwrite each other."""
    decode = pool("decode", Layout(here), staging_bytes=3000)
    prefill = pool("pre", Layout(there))
    pages = list(range(1, 11))
    transfer(decode, prefill, (pages,), (pages[::-1],), (160,))
    for name in decode.key_value:
        same_tokens(decode, prefill, name, pages, pages[::-1], 160)
    if decode.worker._staging is not None:
        assert not decode.worker._staging._taken, "all was given back"


# Slices of heads, as ranks of other tensor-parallel sizes need them.

CACHES = {
    "blocks_first_hnd": lambda heads: blocks_first(4, 16, heads, 4, HND),
    "blocks_first_nhd": lambda heads: blocks_first(4, 16, heads, 4),
    "kv_first": lambda heads: kv_first(4, 16, heads, 4),
    "fused_hnd": lambda heads: fused(4, 16, heads, 4),
    "fused_nhd": lambda heads: fused(4, 16, heads, 4, (0, 2, 1, 3)),
}


class Machine:
    """An agent and registered memory that ranks get theirs from."""

    def __init__(self, name: str):
        self.arena = torch.zeros(1 << 20, dtype=torch.int8)
        self.agent = NixlAgent(name, Memory())
        self.agent.register([Region(self.arena.data_ptr(), self.arena.numel())])
        self.used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        self.used += nbytes
        return self.arena[self.used - nbytes : self.used].zero_()


@pytest.fixture(scope="module")
def machines():
    here, there = Machine("here"), Machine("there")
    return here, there, here.agent.add_peer(there.agent.metadata())


class Rank:
    """A rank's registered memory, of which each element says its K/V, head and place."""

    def __init__(self, machine: Machine, layout: str, rank: int, size: int, total: int, filled):
        start, stop = heads_of_rank(rank, size, total)
        self.geometry = CACHES[layout](stop - start)
        self.raw = machine.take(self.geometry.end)
        if filled:
            for part, content in zip(self.geometry.key_value(self.raw), whole(total)):
                part.copy_(content[:, :, start:stop])

    def key_value(self) -> list[torch.Tensor]:
        return list(self.geometry.key_value(self.raw))


def whole(total: int) -> torch.Tensor:
    """K and V of all heads: (2, pages, tokens, heads, head size)."""
    return torch.arange(2 * 4 * 16 * total * 4, dtype=torch.float32).view(2, 4, 16, total, 4) + 1


def slice_runs(local: Rank, remote: Rank, part, pages) -> Runs:
    ours = local.geometry.restrict(heads=part.local)
    theirs = remote.geometry.restrict(heads=part.remote)
    runs = piece_runs(ours, theirs, 0, 0)
    mine, their_page = np.array(pages).T
    to = local.raw.data_ptr() + ours.offset + mine[:, None] * ours.pitch + runs.local
    source = remote.raw.data_ptr() + theirs.offset + their_page[:, None] * theirs.pitch
    length = np.broadcast_to(runs.length, to.shape).reshape(-1)
    return Runs.merge(to.reshape(-1), (source + runs.remote).reshape(-1), length)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("layouts", [("blocks_first_hnd",) * 2, ("kv_first", "fused_nhd"),
                                     ("fused_hnd", "blocks_first_nhd")])  # fmt: skip
def test_head_slices_over_registered_memory(machines, sizes, layouts):
    """Ranks of one size read their heads from ranks of another: each element comes from the rank
    that holds it, and lands where its head is here."""
    (near, far, peer), (here, there) = machines, sizes
    near.used = far.used = 0
    total = 4
    remotes = [Rank(far, layouts[1], i, there, total, True) for i in range(there)]
    for rank in range(here):
        local = Rank(near, layouts[0], rank, here, total, False)
        for part in head_slices(rank, here, there, total):
            runs = slice_runs(local, remotes[part.remote_rank], part, [(1, 3), (2, 1)])
            reading = near.agent.read(peer, runs, Memory())
            while not reading.is_done():
                far.agent.progress()
        start, stop = heads_of_rank(rank, here, total)
        for mine, content in zip(local.key_value(), whole(total)):
            assert torch.equal(mine[[1, 2]], content[[3, 1], :, start:stop])
            assert not mine[[0, 3]].any()


def test_bytes_of_a_head_slice(machines):
    """H = 2, N = 16, D = 4, K then V, HND: a rank reads [0, 64) and [128, 192), or the rest."""
    remote = Rank(machines[1], "blocks_first_hnd", 0, 1, 2, True)
    for rank, elements in enumerate([(0, 128), (64, 192)]):
        local = Rank(machines[0], "blocks_first_hnd", rank, 2, 2, False)
        [part] = head_slices(rank, 2, 1, 2)
        runs = slice_runs(local, remote, part, [(0, 0)])
        starts = (runs.remote - remote.raw.data_ptr()) // 4
        assert starts.tolist() == list(elements) and (runs.length // 4).tolist() == [64, 64]

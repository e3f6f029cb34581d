# SPDX-License-Identifier: Apache-2.0
"""What is read into the staging buffer are the wanted pieces, each once and nothing else, and each
is copied to its place. Guards against blocks that are read whole for one piece of them, and against
slices that skip or repeat a piece.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.kv_transfer.nixl.test_page_map import D, H, MAKERS, PAGES, fill, tokens_view
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    Paging,
    match_pages,
    piece_tokens,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import LayerPair
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import RegisteredLayer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import arithmetic_runs, split


def raw_of(geometry) -> torch.Tensor:
    return torch.zeros(geometry.end, dtype=torch.int8)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 3), st.randoms())
def test_slices_hold_each_index_once(length, step, swaps, rng):
    into = [3 + step * i for i in range(length)]
    source = rng.sample(range(2 * length), length) if swaps > 2 else list(range(length))
    for _ in range(swaps if length else 0):
        i, j = rng.randrange(length), rng.randrange(length)
        into[i], into[j] = into[j], into[i]
    pairs = []
    for slices in arithmetic_runs(*(np.array(ids, dtype=np.int64) for ids in (into, source))):
        pairs += zip(*(range(one.start, one.stop, one.step) for one in slices), strict=True)
    assert sorted(pairs) == sorted(zip(into, source))


def test_what_follows_one_another_is_one_copy():
    pages = np.arange(100, dtype=np.int64)
    assert len(list(arithmetic_runs(pages + 7, pages))) == 1
    assert len(list(arithmetic_runs(7 + 2 * pages, pages))) == 1
    shuffled = np.array(random.Random(0).sample(range(100), 100), dtype=np.int64)
    assert len(list(arithmetic_runs(shuffled, pages))) < 75


@settings(max_examples=100, deadline=None)
@given(
    layouts=st.tuples(*[st.sampled_from(sorted(MAKERS))] * 2),
    blocks=st.tuples(*[st.sampled_from([(4, 1), (4, 2), (8, 1), (2, 4), (6, 1)])] * 2),
    num_tokens=st.integers(1, 16),
    skipped=st.integers(0, 1),
    buffer_blocks=st.integers(1, 6),
)
def test_pieces_are_read_exactly_and_land_in_place(
    layouts, blocks, num_tokens, skipped, buffer_blocks
):
    """The reads are done byte by byte here; bytes outside them stay zero in the buffer."""
    local, remote = (MAKERS[layout](*block) for layout, block in zip(layouts, blocks))
    here, there = Paging.of(local), Paging.of(remote)
    local_pages = [3, 1, 4, 2][: -(-num_tokens // here.tokens_per_page)]
    remote_pages = [2, 4, 1, 3][: -(-num_tokens // there.tokens_per_page)]
    local_pages[:skipped] = [0] * skipped
    local_raw, remote_raw = raw_of(local), raw_of(remote)
    fill(local, local_raw)
    fill(remote, remote_raw)
    expected = [part.clone() for part in tokens_view(local, local_raw)]
    pieces, _ = match_pages(local_pages, remote_pages, here, there, num_tokens)
    pair = LayerPair(
        RegisteredLayer("a", 0, "", 0, local), RegisteredLayer("a", 0, "", 0, remote), local_raw
    )
    moved = 0
    for part in split(pair, pieces, buffer_blocks * pair.staged_block_nbytes):
        assert part.nbytes <= buffer_blocks * pair.staged_block_nbytes
        buffer = torch.zeros(part.nbytes, dtype=torch.int8)
        for to, source, n in zip(*(column.tolist() for column in part.reads(0))):
            buffer[to : to + n] = remote_raw[source : source + n]
            moved += n
        part.convert(buffer)
    tokens = piece_tokens(local, remote)
    assert moved == len(pieces.local_block) * tokens * 2 * H * D * 4
    for mine, theirs in zip(expected, tokens_view(remote, remote_raw)):
        for token in range(-(-num_tokens // tokens) * tokens):
            page = local_pages[token // here.tokens_per_page]
            if page:
                source = theirs[remote_pages[token // there.tokens_per_page]]
                mine[page, token % here.tokens_per_page] = source[token % there.tokens_per_page]
    for mine, got in zip(expected, tokens_view(local, local_raw)):
        assert torch.equal(mine, got)


@pytest.mark.parametrize("repeated", [2, 3])
def test_a_page_of_the_peers_that_is_named_twice(repeated):
    """Page ids come with requests: the same page twice is read twice, and no more."""
    geometry, other = MAKERS["fused_hnd"](4, 1), MAKERS["kv_first"](4, 1)
    paging = Paging.of(geometry)
    pieces, _ = match_pages(range(1, repeated + 1), [2] * repeated, paging, paging, 4 * repeated)
    raw = raw_of(geometry)
    pair = LayerPair(
        RegisteredLayer("a", 0, "", 0, geometry), RegisteredLayer("a", 0, "", 0, other), raw
    )
    parts = list(split(pair, pieces, PAGES * pair.staged_block_nbytes))
    assert sum(part.nbytes for part in parts) == repeated * geometry.payload

# SPDX-License-Identifier: Apache-2.0
"""Which tokens go to which program."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.ops.paged_batch import PagedBatch


def make_batch(query_lens: list[int]) -> PagedBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(query_lens, dtype=torch.int32)
    return PagedBatch(starts, starts, lens, torch.zeros(len(lens), 1, dtype=torch.int32), 99)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([1, 4, 16]))
def test_every_token_is_in_one_tile_or_a_decode(query_lens, tokens_per_tile):
    """A token in none stays uncomputed; one in two is written twice, or by a tile of another
    request."""
    batch = make_batch(query_lens)
    assert all(n == 1 for n in query_lens[: batch.num_decodes])
    covered = [(request, 0) for request in range(batch.num_decodes)]
    for request, first in batch.prefill_tiles(tokens_per_tile).tolist():
        assert first < query_lens[request]
        covered += [
            (request, token)
            for token in range(first, min(first + tokens_per_tile, query_lens[request]))
        ]
    assert sorted(covered) == [(r, t) for r, n in enumerate(query_lens) for t in range(n)]


def test_tiles_are_made_once_for_all_layers():
    batch = make_batch([1, 1, 20])
    assert batch.num_decodes == 2
    assert batch.prefill_tiles(16) is batch.prefill_tiles(16)
    assert len(batch.prefill_tiles(4)) == 5

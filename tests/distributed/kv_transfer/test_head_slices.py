# SPDX-License-Identifier: Apache-2.0
"""Ranks of two sizes: each head is read once, from a rank that has it."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.utils import head_slices, heads_of_rank


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize("here", [1, 2, 4, 8])
@pytest.mark.parametrize("there", [1, 2, 4, 8])
def test_every_head_once(total, here, there):
    """Guards against heads that are left out, read twice, or taken from the wrong place."""
    for rank in range(here):
        start, stop = heads_of_rank(rank, here, total)
        got = []
        for part in head_slices(rank, here, there, total):
            first, _ = heads_of_rank(part.remote_rank, there, total)
            pairs = zip(range(*part.local), range(*part.remote), strict=True)
            got += [(start + mine, first + theirs) for mine, theirs in pairs]
        assert got == [(head, head) for head in range(start, stop)]


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError):
        heads_of_rank(0, 3, 4)

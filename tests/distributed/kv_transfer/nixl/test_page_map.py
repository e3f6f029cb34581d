# SPDX-License-Identifier: Apache-2.0
"""Copying the runs that two geometries are matched by moves each element to its place, and nothing
else. The fault guarded against: bytes that land in another token, head or page, or in a copy.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.kv_cache_layouts import HND, blocks_first, fused, kv_first
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import page_map
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import (
    KVLayoutMismatch,
    Paging,
    check_convertible,
    match_pages,
    piece_runs,
)
from vllm.v1.kv_cache_geometry import latent_fields

H, D, PAGES = 2, 4, 5
NHD_FUSED = (0, 2, 1, 3)
MAKERS = {
    "kv_first": lambda bs, r: kv_first(PAGES, bs, H, D, r=r),
    "kv_first_hnd": lambda bs, r: kv_first(PAGES, bs, H, D, HND, r=r),
    "blocks_first": lambda bs, r: blocks_first(PAGES, bs, H, D, r=r),
    "blocks_first_hnd": lambda bs, r: blocks_first(PAGES, bs, H, D, HND, r=r),
    "fused_hnd": lambda bs, r: fused(PAGES, bs, H, D, r=r),
    "fused_nhd": lambda bs, r: fused(PAGES, bs, H, D, NHD_FUSED, r=r),
    "padded": lambda bs, r: fused(PAGES, bs, H, D, r=1, pitch=(bs * H * 2 * D + 3) * 4)
    if r == 1
    else fused(PAGES, bs, H, D, r=r),
}


def raw_of(geometry) -> torch.Tensor:
    return torch.zeros(geometry.end + 64, dtype=torch.int8)


def tokens_view(geometry, raw) -> list[torch.Tensor]:
    """K and V as (pages, tokens of a page, heads, head_size), copied out."""
    shape = (geometry.num_pages, geometry.tokens_per_page, H, D)
    return [part.reshape(shape) for part in geometry.key_value(raw)]


def fill(geometry, raw) -> None:
    """Each element a number of its own."""
    for side, part in enumerate(geometry.key_value(raw)):
        part.copy_(torch.arange(part.numel()).view(part.shape) + 100000 * (side + 1))


def copy_runs(local, remote, local_raw, remote_raw, pieces) -> int:
    """As a transfer does it, byte by byte. Returns how many there were."""
    starts = [geometry.dim("block").stride for geometry in (local, remote)]
    moved = 0
    for l_token, r_token, l_blocks, r_blocks in pieces.by_tokens():
        runs = piece_runs(local, remote, l_token, r_token)
        for l_block, r_block in zip(l_blocks.tolist(), r_blocks.tolist()):
            for l_off, r_off, n in zip(*(column.tolist() for column in runs)):
                to = local.offset + l_block * starts[0] + l_off
                source = remote.offset + r_block * starts[1] + r_off
                local_raw[to : to + n] = remote_raw[source : source + n]
                moved += n
    return moved


@settings(max_examples=150, deadline=None)
@given(
    local_layout=st.sampled_from(sorted(MAKERS)),
    remote_layout=st.sampled_from(sorted(MAKERS)),
    local_blocks=st.sampled_from([(4, 1), (4, 2), (2, 2), (8, 1), (2, 4), (6, 1)]),
    remote_blocks=st.sampled_from([(4, 1), (4, 2), (2, 2), (8, 1), (2, 4), (6, 1)]),
    num_tokens=st.integers(1, 24),
    skipped=st.integers(0, 2),
)
def test_each_element_arrives_and_no_other_changes(
    local_layout, remote_layout, local_blocks, remote_blocks, num_tokens, skipped
):
    local, remote = MAKERS[local_layout](*local_blocks), MAKERS[remote_layout](*remote_blocks)
    check_convertible("a", local, remote)
    here, there = Paging.of(local), Paging.of(remote)
    local_pages = [3, 1, 4, 2][: -(-num_tokens // here.tokens_per_page)]
    remote_pages = [2, 4, 1, 3][: -(-num_tokens // there.tokens_per_page)]
    num_tokens = min(num_tokens, 4 * here.tokens_per_page, 4 * there.tokens_per_page)
    local_pages = [0 if i < skipped else page for i, page in enumerate(local_pages)]
    local_raw, remote_raw = raw_of(local), raw_of(remote)
    fill(remote, remote_raw)
    fill(local, local_raw)
    expected = [part.clone() for part in tokens_view(local, local_raw)]
    pieces, missing = match_pages(local_pages, remote_pages, here, there, num_tokens)
    assert not missing
    copy_runs(local, remote, local_raw, remote_raw, pieces)
    step = page_map.math.gcd(here.tokens_per_block, there.tokens_per_block)
    for mine, theirs in zip(expected, tokens_view(remote, remote_raw)):
        for token in range(-(-num_tokens // step) * step):
            page = local_pages[token // here.tokens_per_page]
            if page:
                source = theirs[remote_pages[token // there.tokens_per_page]]
                mine[page, token % here.tokens_per_page] = source[token % there.tokens_per_page]
    for mine, got in zip(expected, tokens_view(local, local_raw)):
        assert torch.equal(mine, got)


def test_four_token_pieces_into_pages_of_16_change_the_cache_itself():
    """Four HND pages of 4 tokens become one of 16, in the cache and not in a copy of it."""
    local, remote = fused(PAGES, 16, H, D), fused(PAGES, 4, H, D)
    local_raw, remote_raw = raw_of(local), raw_of(remote)
    fill(remote, remote_raw)
    cache = local.view(local_raw)
    pieces, _ = match_pages([2], [4, 1, 3, 2], Paging(16, 16), Paging(4, 4), 16)
    assert copy_runs(local, remote, local_raw, remote_raw, pieces) == local.payload
    theirs = remote.view(remote_raw)
    for token in range(16):
        for head in range(H):
            for element in range(2 * D):
                expected = theirs[[4, 1, 3, 2][token // 4], head, token % 4, element]
                assert cache[2, head, token, element] == expected != 0
    assert not cache[[0, 1, 3, 4]].any()


def test_head_slices_of_the_documented_page():
    """H = 2, N = 16, D = 4, a page holds K then V, HND: rank 0 of 2 needs the elements [0, 64) and
    [128, 192), rank 1 [64, 128) and [192, 256)."""
    whole = blocks_first(PAGES, 16, 2, 4, HND)
    for rank, expected in enumerate([[(0, 64), (128, 192)], [(64, 128), (192, 256)]]):
        runs = whole.restrict(heads=(rank, rank + 1)).page_runs(0)
        assert [(start // 4, (start + n) // 4) for start, n in runs] == expected


def test_equal_layouts_are_one_run_a_page():
    geometry = fused(PAGES, 16, H, D)
    runs = piece_runs(geometry, fused(PAGES + 3, 16, H, D), 0, 0)
    assert runs.length.tolist() == [geometry.payload]
    split = piece_runs(geometry, kv_first(PAGES, 16, H, D), 0, 0)
    assert split.nbytes == geometry.payload and len(split.length) > 1


def test_runs_of_equal_digest_are_split_where_either_is():
    """K/V-first storage and blocks-first hold the same bytes in the same order."""
    runs = piece_runs(kv_first(PAGES, 4, H, D), blocks_first(PAGES, 4, H, D), 0, 0)
    half = 4 * H * D * 4
    assert runs.local.tolist() == [0, PAGES * half]
    assert runs.remote.tolist() == [0, half]
    assert runs.length.tolist() == [half, half]


def test_pages_that_the_peer_lacks_are_named():
    """A window that slid out there (0), and tokens behind the peer's last page."""
    pieces, missing = match_pages([1, 2, 3, 4], [0, 7], Paging(4, 4), Paging(4, 4), 16)
    assert missing == {1, 3, 4}
    assert pieces.local_block.tolist() == [2] and pieces.remote_block.tolist() == [7]


@pytest.mark.parametrize(
    "remote, words",
    [
        (fused(PAGES, 16, 4, D), "key of 4 heads"),
        (fused(PAGES, 16, H, 8), "of 8 float32"),
        (fused(PAGES, 16, H, D, dtype="bfloat16"), "bfloat16"),
        (fused(PAGES, 16, H, D, fields=latent_fields(2 * D, "float32")), "latent"),
        (fused(PAGES, 16, H, D, fields=()), "not known"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(remote, words):
    with pytest.raises(KVLayoutMismatch, match=words) as refused:
        check_convertible("layers.3.attn", fused(PAGES, 16, H, D), remote)
    assert "layers.3.attn" in str(refused.value)


def test_a_block_too_large_to_be_one_is_not_computed():
    vast = fused(1, 1 << 20, 64, D)
    with pytest.raises(KVLayoutMismatch, match="elements"):
        check_convertible("a", vast, vast)

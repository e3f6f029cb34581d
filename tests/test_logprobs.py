# SPDX-License-Identifier: Apache-2.0
"""Flat logprobs say what the dicts say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.logprobs import (
    FlatLogprobs,
    Logprob,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)

ENTRY = st.builds(Logprob, st.floats(-9, 0), st.integers(1, 9) | st.none(), st.text() | st.none())
POSITIONS = st.lists(st.none() | st.dictionaries(st.integers(0, 99), ENTRY, min_size=1))


@given(POSITIONS, POSITIONS, st.slices(6))
def test_flat_equals_dicts(first, second, part):
    """Whole, by position, in slices, and joined."""
    flat, other = FlatLogprobs(), FlatLogprobs()
    flat.extend(first)
    other.extend(second)
    assert list(flat) == first and list(flat[part]) == first[part]
    flat.extend(other)
    assert list(flat) == first + second and len(flat) == len(first) + len(second)
    flat += flat
    assert list(flat) == 2 * (first + second)


def test_flat_is_only_added_to():
    flat = create_prompt_logprobs(True)
    assert list(flat) == [None]
    for change in (
        lambda: flat.insert(0, None), lambda: flat.__setitem__(0, None), lambda: flat.pop(),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            change()
    with pytest.raises(IndexError):
        flat[1]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("token_ids", "rank", "num_logprobs", "ranks_are_known", "expected"),
    [
        ([7, 1, 2], 9, 2, True, {7: 9, 1: 1, 2: 2}),
        ([7, 1, 2], 9, 1, True, {7: 9, 1: 1}),
        ([7, 1, 2], 9, 0, True, {7: 9}),
        ([1, 1, 2], 1, 2, True, {1: 1, 2: 2}),
        ([2, 1, 2], 2, -1, True, {2: 2, 1: 1}),
        ([2, 5, 2], 4, 2, False, {2: 4, 5: None}),
    ],
)
def test_a_position(flat, token_ids, rank, num_logprobs, ranks_are_known, expected):
    """The token that was taken comes first and once; guards against a rank of the wrong token."""
    logprobs = create_sample_logprobs(flat)
    append_logprobs_for_next_position(
        logprobs, token_ids, [-0.5, -1.0, -2.0], ["a", "b", "c"], rank, num_logprobs, ranks_are_known
    )
    (position,) = logprobs
    assert {token: entry.rank for token, entry in position.items()} == expected
    assert list(position) == list(expected)
    assert position[token_ids[0]].decoded_token == "a"

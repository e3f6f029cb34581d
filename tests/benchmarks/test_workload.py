# SPDX-License-Identifier: Apache-2.0
"""Both engines get the same prompts: a workload follows from its seed and shape alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.benchmarks.workload import Workload, random_workload

COUNTS = st.integers(1, 12)


@given(COUNTS, COUNTS, COUNTS, st.integers(0, 2**31), st.sets(st.integers(0, 40), max_size=30))
def test_shape_and_ids(num_prompts, input_len, output_len, seed, excluded):
    """Guards against special ids inside prompts and against prompts of another length."""
    workload = random_workload(num_prompts, input_len, output_len, 50, seed, excluded)
    assert workload.num_prompts == num_prompts
    assert workload.num_input_tokens == num_prompts * input_len
    assert workload.num_output_tokens == num_prompts * output_len
    ids = {token for prompt in workload.prompts for token in prompt}
    assert ids <= set(range(50)) - excluded


@given(COUNTS, COUNTS, st.integers(0, 2**31))
def test_same_seed_same_prompts(num_prompts, input_len, seed):
    """A larger batch begins with the smaller one, so that batch sizes can be compared."""
    small = random_workload(num_prompts, input_len, 4, 1000, seed)
    large = random_workload(num_prompts + 3, input_len, 4, 1000, seed)
    assert large.prompts[:num_prompts] == small.prompts


@given(COUNTS, st.integers(1, 50), st.floats(0, 0.99), st.integers(0, 2**31))
def test_lengths_in_a_range(num_prompts, input_len, ratio, seed):
    """Lengths keep to the range, and a larger batch begins with the smaller one here too."""
    small = random_workload(num_prompts, input_len, 4, 1000, seed, range_ratio=ratio)
    lengths = [len(prompt) for prompt in small.prompts]
    assert all(1 <= n and input_len * (1 - ratio) - 1 < n for n in lengths)
    assert all(n <= max(1, input_len * (1 + ratio)) for n in lengths)
    large = random_workload(num_prompts + 3, input_len, 4, 1000, seed, range_ratio=ratio)
    assert large.prompts[:num_prompts] == small.prompts


def test_seeds_differ():
    assert random_workload(2, 20, 4, 1000, 0) != random_workload(2, 20, 4, 1000, 1)


@pytest.mark.parametrize(
    "shape, name", [((0, 1, 1), "num_prompts"), ((1, 0, 1), "input_len"), ((1, 1, 0), "output_len")]
)
def test_counts_below_one_are_refused(shape, name):
    with pytest.raises(ValueError, match=name):
        random_workload(*shape, vocab_size=10, seed=0)


def test_no_id_left_is_refused():
    with pytest.raises(ValueError, match="excluded"):
        random_workload(1, 1, 1, vocab_size=3, seed=0, excluded_ids=[0, 1, 2])


def test_mixed_lengths_are_counted():
    workload = Workload(((1, 2, 3), (4,)), output_len=5)
    assert (workload.num_input_tokens, workload.num_output_tokens) == (4, 10)

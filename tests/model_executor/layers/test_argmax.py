# SPDX-License-Identifier: Apache-2.0
"""argmax on the CPU is torch's of the widened values, to the place and to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.argmax import Argmax

INF, NAN = float("inf"), float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def check(x: torch.Tensor) -> None:
    """The places, and of which rows nothing is above -inf."""
    wide = x.float()
    places, is_lowest = cpu_ops.argmax(x)
    assert places.tolist() == wide.argmax(dim=-1).tolist()
    assert torch.equal(is_lowest, (wide == -INF).all(dim=-1))


@DTYPES
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_few_values_are_full_of_ties(dtype, data):
    """Sizes about a vector's width, rows in a wider tensor whose gaps hold larger values. Guards
    against a later one of equal maxima (lanes are compared in another order than columns), zeros of
    different sign taken for different, NaN that is passed over, a row of -inf without a place, and
    tails that see the gap or the zeros with which it is filled."""
    rows, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    values = data.draw(st.sampled_from([(-3.0, -2.0), (-0.0, 0.0), (-INF, -1.0), (-INF, NAN, INF)]))
    wide = torch.full((rows, size + 3), NAN)
    for row in wide:
        row[:size] = torch.tensor(
            data.draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))
        )
    check(wide.to(dtype)[:, :size])


@DTYPES
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_of_a_vocabulary(dtype, rows):
    """Several threads' rows, each the size of a vocabulary; the maximum at both ends as well."""
    torch.manual_seed(0)
    x = torch.randn(rows, 49_155).to(dtype)[:, :49_152]
    check(x)
    x[0, -1] = 100
    check(x)
    x[0, 0] = 100
    check(x)
    x[-1] = -INF
    check(x)


def test_columns_that_lie_apart_are_taken_too():
    """Guards against strides that are read as if there were none."""
    check(torch.randn(40, 6, dtype=torch.bfloat16).t())


def test_other_shapes_are_refused():
    """Guards against reading what is not there."""
    for shape in ((4, 0), (4,), (2, 2, 2)):
        with pytest.raises(ValueError, match="argmax takes"):
            cpu_ops.argmax(torch.zeros(shape))


def test_the_layer_means_the_same_everywhere():
    """Guards against a device's kernel that differs from torch's operations."""
    logits = torch.randn(3, 500, dtype=torch.bfloat16)
    logits[1, 7], logits[2] = NAN, -INF
    layer = Argmax()
    for ours, torchs in zip(layer.forward_cpu(logits), layer.forward_native(logits), strict=True):
        assert torch.equal(ours, torchs) and ours.dtype is torchs.dtype

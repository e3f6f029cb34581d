# SPDX-License-Identifier: Apache-2.0
"""What goes to another process comes out the same."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 3), max_size=3)


def through(value, kind=None):
    data = MsgpackEncoder().encode(value)
    return (MsgpackDecoder(kind) if kind is not None else MsgpackDecoder()).decode(data)


@settings(max_examples=60)
@given(shapes, st.sampled_from(DTYPES), st.booleans())
def test_tensors_keep_dtype_shape_and_bits(shape, dtype, is_transposed):
    """Fault: bfloat16 goes through float32, empty or 0-dimensional tensors fail, the strides of a
    transposed one are lost."""
    tensor = (torch.randn(shape) * 3).to(dtype)
    if is_transposed:
        tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
    got = through([tensor])[0]
    assert got.dtype == dtype and got.shape == tensor.shape and torch.equal(got, tensor)


@settings(max_examples=30)
@given(shapes, st.sampled_from(["<f4", "<i8", "|b1", ">i2"]))
def test_arrays_keep_dtype_and_shape(shape, dtype):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    got = through({"a": array})["a"]
    assert got.dtype == array.dtype and np.array_equal(got, array)


def test_a_received_tensor_can_be_written_to():
    """Fault: it shares the read-only bytes of the message."""
    got = through(torch.zeros(3))
    got += 1
    assert got.tolist() == [1, 1, 1]


def test_a_request_with_an_encoder_input():
    """Fault: a field forgets its slices, dim or keep_on_cpu, so that the engine batches it wrong."""
    configs = [
        MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        MultiModalFieldConfig.flat("image", [slice(0, 2), slice(2, None)]),
        MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([1, 2]), dim=1),
        MultiModalFieldConfig.shared("image", 4),
    ]
    data = [torch.randn(3, 3, dtype=torch.bfloat16), [torch.ones(1), torch.zeros(2)], 7]
    item = MultiModalKwargsItem(
        {
            f"{i}-{j}": MultiModalFieldElem(value, config.field)
            for i, config in enumerate(configs)
            for j, value in enumerate(data)
        }
    )
    position = PlaceholderRange(0, 3, torch.tensor([True, False, True]))
    position.embeds_cumsum  # noqa: B018 - caches on the instance what must not travel
    request = EngineCoreRequest(
        "r",
        [2, 0],
        SamplingParams(),
        1.0,
        mm_features=[
            MultiModalFeatureSpec(item, "image", "id", position, "hash"),
            MultiModalFeatureSpec(None, "text", "other", PlaceholderRange(0, 5)),
        ],
    )
    assert through(request, EngineCoreRequest).mm_features == request.mm_features


def test_what_is_not_data_is_refused():
    with pytest.raises(TypeError, match="cannot be sent"):
        through(object())
    with pytest.raises((TypeError, msgspec.DecodeError), match="not known"):
        MsgpackDecoder().decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"")))

# SPDX-License-Identifier: Apache-2.0
"""Placeholder ranges and field configs: what is taken apart comes together again."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    batched_tensors_equal,
    nested_tensors_equal,
)

masks = st.lists(st.booleans(), min_size=1, max_size=12)


@given(masks, st.integers(0, 50), st.data())
def test_the_embeddings_of_any_part_of_a_range_are_counted_right(mask, offset, data):
    """Fault: a chunk of a prompt gets the embeddings of another chunk."""
    position = PlaceholderRange(offset, len(mask), torch.tensor(mask))
    start = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(start, len(mask)))
    first, stop = position.get_embeds_indices_in_range(start, end)
    assert first == sum(mask[:start]) and stop - first == sum(mask[start:end])
    assert position.get_num_embeds() == sum(mask)
    positions = [p for a, b in position.extract_embeds_range() for p in range(a, b + 1)]
    assert positions == [offset + i for i, flag in enumerate(mask) if flag]
    runs = position.extract_embeds_range()
    assert all(b + 1 < c for (_, b), (c, _) in zip(runs, runs[1:], strict=False))


def test_without_a_mask_every_position_takes_an_embedding():
    position = PlaceholderRange(3, 4)
    assert position.get_num_embeds() == 4
    assert position.get_embeds_indices_in_range(1, 3) == (1, 3)
    assert position.extract_embeds_range() == [(3, 6)]
    assert PlaceholderRange(3, 0).extract_embeds_range() == []


def test_ranges_are_compared_with_their_masks():
    """Fault: the truth value of a comparison of tensors raises, or is that of the first element."""
    one, other = (PlaceholderRange(0, 2, torch.tensor(mask)) for mask in ([1, 1], [1, 0]))
    assert one != other and one == PlaceholderRange(0, 2, torch.tensor([1, 1]))
    assert one != PlaceholderRange(0, 2) and PlaceholderRange(0, 2) == PlaceholderRange(0, 2)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2))
def test_flat_items_concatenate_to_what_they_were_cut_from(sizes, dim):
    """Fault: items cut along another dimension than they lie along; an empty item moves others."""
    shape = [2, 3, 4]
    shape[dim] = sum(sizes)
    data = torch.arange(torch.Size(shape).numel()).reshape(shape)
    config = MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(sizes), dim)
    elems = config.build_elems("x", data)
    assert [elem.data.shape[dim] for elem in elems] == sizes
    assert torch.equal(config.field.reduce_data(list(elems)), data)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_batched_items_stack_where_shapes_agree_and_stay_a_list_elsewhere(widths):
    """Fault: an item of its own shape is padded, or dropped."""
    data = [torch.full((2, width), float(i)) for i, width in enumerate(widths)]
    config = MultiModalFieldConfig.batched("image")
    reduced = config.field.reduce_data(list(config.build_elems("x", data)))
    assert isinstance(reduced, torch.Tensor) == (len(set(widths)) == 1)
    assert len(reduced) == len(widths)
    assert all(torch.equal(a, b) for a, b in zip(reduced, data, strict=True))


def test_items_of_several_keys_and_modalities():
    """Fault: keys of one modality end up in the items of another; a shared key is batched."""
    items = MultiModalKwargsItems.from_hf_inputs(
        {
            "pixel_values": torch.arange(12.0).reshape(2, 6),
            "scale": torch.tensor([3.0]),
            "input_ids": [torch.tensor([1, 2, 3])],
            "unused": torch.zeros(9),
        },
        {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "scale": MultiModalFieldConfig.shared("image", 2),
            "input_ids": MultiModalFieldConfig.batched("text"),
            "absent": MultiModalFieldConfig.batched("text"),
        },
    )
    assert {modality: len(found) for modality, found in items.items()} == {"image": 2, "text": 1}
    assert set(items["image"][1]) == {"pixel_values", "scale"}
    assert items["text"][0].get_data()["input_ids"].tolist() == [1, 2, 3]
    data = items.get_data(device="cpu")
    assert data["pixel_values"].shape == (2, 6) and data["scale"].tolist() == [3.0]
    with pytest.raises(KeyError, match="audio.*image"):
        items["audio"]


def test_keys_with_different_numbers_of_items_are_refused():
    configs = {key: MultiModalFieldConfig.batched("image") for key in "ab"}
    with pytest.raises(ValueError, match="different numbers of items"):
        MultiModalKwargsItems.from_hf_inputs({"a": torch.ones(2), "b": torch.ones(3)}, configs)


def test_an_item_without_data_is_named():
    items = MultiModalKwargsItems({"image": [MultiModalKwargsItem.dummy(), None]})
    with pytest.raises(RuntimeError, match="item 1 of image"):
        items.get_data()


def test_gather_kwargs_skips_features_without_data():
    item = MultiModalKwargsItem(
        {"ids": MultiModalFieldElem(torch.tensor([4]), MultiModalBatchedField())}
    )
    features = [
        MultiModalFeatureSpec(data, "text", str(i), PlaceholderRange(0, 1))
        for i, data in enumerate([item, None, item])
    ]
    gathered = MultiModalFeatureSpec.gather_kwargs(features, {"ids"})
    assert nested_tensors_equal(gathered["ids"], [torch.tensor([4])] * 2)


def test_equality_sees_dtype_shape_and_structure():
    one = torch.ones(2)
    assert nested_tensors_equal([one, [one]], [one, [one.clone()]])
    assert not nested_tensors_equal(one, one.int()) and nested_tensors_equal(one, one.int(), False)
    assert not nested_tensors_equal(one, one.reshape(1, 2))
    assert not nested_tensors_equal([one], one) and not nested_tensors_equal([one], [one, one])
    assert batched_tensors_equal({"a": one}, {"a": one})
    assert not batched_tensors_equal({"a": one}, {"a": one, "b": one})


@pytest.mark.parametrize("module", ["vllm.multimodal", "vllm.v1.engine", "vllm.v1.serial_utils"])
def test_imports_leave_torch_out(module):
    """Fault: the server's first process takes seconds longer to start."""
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'PIL'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_types_that_plugins_write_unions_with():
    """Fault: a name that stands for a type is a string at run time, so that a plugin's signature
    `MultiModalEmbeddings | None` is a TypeError."""
    from vllm.inputs import ModalityData, MultiModalDataDict
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.multimodal.inputs import BatchedTensorInputs, MultiModalKwargsOptionalItems
    from vllm.multimodal.inputs import NestedTensors as Nested
    from vllm.multimodal.parse import ModalityDataParser

    for kind in (
        MultiModalEmbeddings, MultiModalDataDict, ModalityData[str], Nested, BatchedTensorInputs,
        MultiModalKwargsOptionalItems, ModalityDataParser,
    ):  # fmt: skip
        assert type(None) in (kind | None).__args__

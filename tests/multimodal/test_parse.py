# SPDX-License-Identifier: Apache-2.0
"""Users' data in all their forms are read as the same items, and others are refused by name."""

import numpy as np
import pytest
import torch
from PIL import Image

from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.parse import (
    ImageProcessorItems,
    MultiModalDataParser,
    ProcessorBatchItems,
    TextProcessorItems,
    parse_mm_uuids,
)

RGB = Image.new("RGB", (5, 4))
ARRAY = np.zeros((4, 5, 3), np.uint8)


def parse(**data):
    return MultiModalDataParser().parse_mm_data(data)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (RGB, 1),
        ([RGB, RGB], 2),
        (MediaWithBytes(RGB, b""), 1),
        (ARRAY, 1),
        (ARRAY.transpose(2, 0, 1), 1),
        (np.stack([ARRAY] * 3), 3),
        (torch.zeros(3, 4, 5), 1),
        (torch.zeros(2, 3, 4, 5), 2),
        ([ARRAY, RGB, torch.zeros(3, 4, 5)], 3),
    ],
)
def test_images_in_all_forms(data, count):
    """Fault: an array's first dimension is taken for a batch; channels are taken for pixels."""
    items = parse(image=data)
    images = items.get_items("image", ImageProcessorItems)
    assert items.get_all_counts() == {"image": count} and len(images.get_all()) == count
    assert {images.get_image_size(i) for i in range(count)} == {(5, 4)}
    assert len(images.get_processor_data()["images"]) == count


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a.png", "not str"),
        (b"\x89PNG", "not bytes"),
        (np.zeros((4, 5)), r"three dimensions.*\(4, 5\)"),
        (np.zeros((0, 5, 3)), "three dimensions"),
        (torch.zeros(7, 9), "embeddings.*not supported"),
        ([RGB, None], "image 1 .*not NoneType"),
    ],
)
def test_what_is_no_image(data, message):
    with pytest.raises(ValueError, match=message):
        parse(image=data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("ab", ["ab"]), (["ab", ""], ["ab", ""]), ([1, 2], [[1, 2]]), ((1, 2), [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]), (["ab", [4]], ["ab", [4]]), (np.array([1]).tolist(), [[1]]),
    ],
)  # fmt: skip
def test_texts_and_their_token_ids(data, expected):
    """Fault: token ids are taken for as many texts; a text for its letters."""
    items = parse(text=data).get_items("text", TextProcessorItems)
    assert items.get_all() == expected and items.get_processor_data() == {"texts": expected}


def test_nothing_is_no_item_and_other_modalities_are_refused():
    assert parse(image=None, text=[]) == {}
    with pytest.raises(ValueError, match="'audio' is not supported; supported: image, text"):
        parse(audio=[0.1])
    with pytest.raises(KeyError, match="no image"):
        parse(text="a").get_count("image")
    assert parse(text="a").get_count("image", strict=False) == 0
    with pytest.raises(TypeError, match="TextProcessorItems"):
        parse(text="a").get_items("text", ImageProcessorItems)


def test_a_plugin_adds_a_modality():
    """The way of every parser for vLLM: a subclass with one more sub-parser."""

    class SoundItems(ProcessorBatchItems[float]):
        def __init__(self, data):
            super().__init__(data, "sound")

    class Parser(MultiModalDataParser):
        def _get_subparsers(self):
            return {**super()._get_subparsers(), "sound": SoundItems}

    items = Parser().parse_mm_data({"sound": [0.5], "text": "a"})
    assert items["sound"].get_processor_data() == {"sounds": [0.5]}
    assert list(items.select({"sound"})) == ["sound"]


def test_uuids_are_a_list_for_each_modality():
    uuids = {"image": "a", "text": ["b", None]}
    assert parse_mm_uuids(uuids) == {"image": ["a"], "text": ["b", None]}
    assert parse_mm_uuids(None) == {}

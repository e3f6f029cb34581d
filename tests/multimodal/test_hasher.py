# SPDX-License-Identifier: Apache-2.0
"""Equal inputs of an encoder have equal hashes, others do not: a wrong "equal" gives a request the
encoder output of another."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vllm.multimodal import MultiModalHasher
from vllm.multimodal.media.base import MediaWithBytes

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def hash_of(value):
    return MultiModalHasher.hash_kwargs(item=value)


def canonical(value):
    """With types, as True == 1 in Python."""
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    if isinstance(value, list):
        return [canonical(part) for part in value]
    return type(value).__name__, value


@given(trees, trees)
def test_values_hash_alike_if_and_only_if_they_are_alike(a, b):
    """Fault: parts run together, so that ["ab", "c"] is ["a", "bc"]; a number is its text."""
    assert (hash_of(a) == hash_of(b)) == (canonical(a) == canonical(b))


def test_token_ids():
    """Lists of numbers have a way of their own. Fault: a number too large for it is cut off, a truth
    value is taken for a number, or the bytes of a list are those of something else."""
    values = [[1, 2], [2, 1], [1, 2, 0], [1, True], [1, "2"], [[1, 2]], [1, 2 + (1 << 64)], [1 << 63]]
    values += [[], np.array([1, 2]), np.array([1, 2]).tobytes(), [b"ints", b"\x01" + bytes(7)]]
    assert len({hash_of(value) for value in values}) == len(values)
    assert hash_of((1, 2)) == hash_of([1, 2])


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)))
def test_the_order_of_names_does_not_count(values):
    reordered = dict(reversed(values.items()))
    assert MultiModalHasher.hash_kwargs(**values) == MultiModalHasher.hash_kwargs(**reordered)


def test_dtype_and_shape_count():
    """Fault: only the bytes are hashed; these all have the same."""
    arrays = [
        np.zeros((2, 6), np.uint8), np.zeros((6, 2), np.uint8), np.zeros((2, 6), np.int8),
        np.zeros((2, 3), np.float16),
    ]  # fmt: skip
    tensors = [torch.from_numpy(array) for array in arrays]
    tensors.append(torch.zeros(2, 3, dtype=torch.bfloat16))
    hashes = [hash_of(value) for value in [*arrays, *tensors, bytes(12)]]
    assert len(set(hashes)) == len(hashes)


def test_strides_do_not_count():
    array = np.arange(6).reshape(2, 3)
    assert hash_of(array) == hash_of(np.asfortranarray(array))
    tensor = torch.arange(6).reshape(2, 3)
    assert hash_of(tensor) == hash_of(tensor.T.contiguous().T)


def test_modes_of_images_count():
    """Fault: an image with transparent pixels is one without; a palette's colours are left out."""
    grey = Image.new("L", (2, 2), 7)
    rgb = Image.new("RGB", (2, 2), (7, 7, 7))
    opaque, clear = (Image.new("RGBA", (2, 2), (7, 7, 7, alpha)) for alpha in (255, 0))
    palettes = []
    for colours in ([1, 2, 3], [3, 2, 1]):
        image = Image.new("P", (2, 2))
        image.putpalette(colours)
        palettes.append(image)
    see_through = palettes[0].copy()
    see_through.info["transparency"] = 0
    wide = Image.new("L", (4, 1), 7)
    images = [grey, rgb, opaque, clear, *palettes, see_through, wide]
    assert len({hash_of(image) for image in images}) == len(images)
    assert all(hash_of(image) == hash_of(image.copy()) for image in images)


def test_an_image_is_the_same_with_and_without_its_file():
    image = Image.new("RGB", (2, 2), "red")
    assert hash_of(MediaWithBytes(image, b"png")) == hash_of(image)


def test_what_has_no_known_content_is_refused():
    """Fault: an object is hashed by its address, so that equal inputs are never found again."""
    for value in (object(), np.array([object()])):
        with pytest.raises(TypeError, match="cannot be hashed"):
            hash_of(value)

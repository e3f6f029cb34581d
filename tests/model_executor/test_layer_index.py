# SPDX-License-Identifier: Apache-2.0
"""`extract_layer_index`: which integer of a name is the layer's."""

from __future__ import annotations

import pytest

from vllm.model_executor.models.utils import extract_layer_index


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("transformer.h.7.attn", 7),
        ("model.layers.3.self_attn.0", 3),
        ("draft.0.layers.3.attn", 3),
        ("encoder.blocks.1.layers.4.attn", 1),
        ("attn.5", 5),
    ],
)
def test_index(name, index):
    """Taking another integer than the layer's gives a layer another's window or cache."""
    assert extract_layer_index(name) == index


def test_modules_count_on():
    """With two modules a layer, indices interleave without colliding."""
    names = [f"model.layers.{i}.self_attn.{j}" for i in range(3) for j in range(2)]
    assert [extract_layer_index(name, 2) for name in names] == list(range(6))
    assert extract_layer_index("model.layers.2.mixer", 2) == 4


def test_no_index():
    """Guessing 0 would let a nameless layer collide with the first."""
    with pytest.raises(ValueError, match="'lm_head' has no layer index"):
        extract_layer_index("lm_head")

# SPDX-License-Identifier: Apache-2.0
"""Which integer of a name is the layer's, and how many attention modules each layer has."""

from __future__ import annotations

import pytest

from vllm.model_executor.layer_index import count_attention_modules
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


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["model.layers.0.self_attn.0.attn", "model.layers.0.self_attn.1.attn"], 2),
        (["model.layers.0.attn.2", "model.layers.0.attn.0"], 3),
        (["model.layers.0.self_attn.0", "model.layers.1.self_attn.0"], 1),
        (["stages.0.layers.0.attn", "stages.0.layers.1.attn"], 1),
        (["decoder.layers.0.self_attn.attn", "decoder.layers.0.encoder_attn.attn"], 1),
        (["latent"], 1),
        ([], 1),
    ],
)
def test_attention_modules_of_a_layer(names, modules):
    """Too few: two caches of one index, which some runners refuse. Too many: holes in the order."""
    assert count_attention_modules(names) == modules

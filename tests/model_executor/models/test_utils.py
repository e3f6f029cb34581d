# SPDX-License-Identifier: Apache-2.0
"""Renaming and loading of weights."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    cast_overflow_tensors,
    make_layers,
    maybe_prefix,
)


class Inner(nn.Module):
    """Has a loader of its own, which sees names without the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: list[str] = []

    def load_weights(self, weights):
        names = set()
        for name, tensor in weights:
            self.seen.append(name)
            self.weight.data.copy_(tensor)
            names.add(name)
        return names


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("table", torch.zeros(2))


def weights(*names: str):
    shapes = {"linear.weight": (3, 2), "linear.bias": (3,)}
    return [(name, torch.ones(shapes.get(name, (2,)))) for name in names]


def test_weights_go_where_their_names_say():
    """Children with their own loader get their part; the others and buffers are filled directly."""
    model = Outer()
    loaded = AutoWeightsLoader(model).load_weights(
        weights("inner.weight", "linear.weight", "table", "linear.bias")
    )
    assert loaded == {"inner.weight", "linear.weight", "linear.bias", "table"}
    assert model.inner.seen == ["weight"]
    for tensor in (model.inner.weight, model.linear.weight, model.linear.bias, model.table):
        assert (tensor == 1).all()


@pytest.mark.parametrize("name", ["other.weight", "linear.other", "linear.weight.extra", "x"])
def test_unexpected_weights_are_named(name):
    """A weight without a place means that the model is not the checkpoint's: it must be refused."""
    with pytest.raises(ValueError, match=re.escape(name)):
        AutoWeightsLoader(Outer()).load_weights(weights(name))


def test_skipping():
    """Only what an option names is skipped; tables that are worked out here always are."""
    names = ("skip.weight", "linear.weight", "a.rotary_emb.inv_freq", "extra.scale", "x.odd.weight")
    loader = AutoWeightsLoader(
        Outer(),
        skip_prefixes=["skip."],
        skip_substrs=[".odd."],
        ignore_unexpected_prefixes=["extra."],
    )
    assert loader.load_weights(weights(*names)) == {"linear.weight"}


def test_a_wrong_shape_is_named():
    """The message holds the weight's name and both shapes."""
    with pytest.raises(ValueError, match=r"linear\.weight.*\(5, 5\).*\(3, 2\)"):
        AutoWeightsLoader(Outer()).load_weights([("linear.weight", torch.ones(5, 5))])


def test_mapper_rules():
    """Every kind of rule renames, drops on None, and leaves other names alone."""
    mapper = WeightsMapper(
        orig_to_new_regex={re.compile(r"block(\d)"): r"layers.\1", re.compile("junk"): None},
        orig_to_new_substr={".attention.": ".self_attn.", ".bad.": None},
        orig_to_new_prefix={"transformer.": "model.", "aux.": None},
        orig_to_new_suffix={".gamma": ".weight", ".tmp": None},
    )
    names = ["transformer.block3.attention.gamma", "junk.x", "a.bad.b", "aux.w", "w.tmp", "same"]
    assert mapper.apply_list(names) == ["model.layers.3.self_attn.weight", "same"]
    assert [name for name, _ in mapper.apply((n, None) for n in names)] == mapper.apply_list(names)
    assert mapper.apply_dict({"aux.w": 1, "same": 2}) == {"same": 2}
    both = mapper | WeightsMapper(orig_to_new_prefix={"aux.": "kept."})
    assert both.apply_list(["aux.w"]) == ["kept.w"]


def test_loader_applies_a_mapper():
    """The mapper's names are the ones that are looked up."""
    mapper = WeightsMapper(orig_to_new_prefix={"old.": "linear."})
    loaded = AutoWeightsLoader(Outer()).load_weights(
        [("old.weight", torch.ones(3, 2))], mapper=mapper
    )
    assert loaded == {"linear.weight"}


def test_layers_are_named_by_position():
    """Prefixes must be unique: attention layers are found by them."""
    prefixes = []

    def layer(prefix: str) -> nn.Module:
        prefixes.append(prefix)
        return nn.Identity()

    start, end, layers = make_layers(3, layer, prefix="model.layers")
    assert (start, end, len(layers)) == (0, 3, 3)
    assert prefixes == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert maybe_prefix("", "x") == "x" and maybe_prefix("a", "x") == "a.x"


def test_overflow_is_clamped():
    """Infinities of float16 become finite; finite tensors come back as they are."""
    fine = torch.tensor([1.0, -2.0], dtype=torch.float16)
    assert torch.equal(cast_overflow_tensors(fine), fine)
    clamped = cast_overflow_tensors(torch.tensor([float("inf"), 1.0], dtype=torch.float16))
    assert clamped.isfinite().all() and clamped[1] == 1

# SPDX-License-Identifier: Apache-2.0
"""Which forward a layer takes, and how an out-of-tree platform replaces layers."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear


class Platform:
    """What dispatch asks of a platform."""

    def __init__(self, device_type: str, out_of_tree: bool = False) -> None:
        self.device_type = device_type
        self.out_of_tree = out_of_tree

    def is_out_of_tree(self) -> bool:
        return self.out_of_tree


class Op(CustomOp):
    def forward_native(self):
        return "native"

    def forward_cpu(self):
        return "cpu"

    def forward_cuda(self):
        return "cuda"


class OwnOp(Op):
    def forward_oot(self):
        return "own"


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.setattr(custom_op, "op_registry", {})
    monkeypatch.setattr(custom_op, "op_registry_oot", {})


@pytest.mark.parametrize(
    ("op", "platform", "takes"),
    [
        (Op, Platform("cpu"), "cpu"),
        (Op, Platform("cuda"), "cuda"),
        (Op, Platform("xpu"), "native"),
        (Op, Platform("npu", out_of_tree=True), "native"),
        # An out-of-tree platform on CPU tensors gets the CPU's form unless it writes its own.
        (Op, Platform("cpu", out_of_tree=True), "cpu"),
        (OwnOp, Platform("cpu", out_of_tree=True), "own"),
        (OwnOp, Platform("cpu"), "cpu"),
    ],
)
def test_forward_by_platform(monkeypatch, op, platform, takes):
    """The device type decides, once, when the layer is made."""
    monkeypatch.setattr(custom_op, "current_platform", platform)
    assert op()() == takes


def test_layers_are_replaced_by_class_name():
    """A platform's class is made wherever a model makes the original, with the same arguments."""

    @RMSNorm.register_oot
    class RMSNorm2(RMSNorm):
        pass

    assert type(RMSNorm(4)) is RMSNorm  # it was registered under its own name only

    @CustomOp.register_oot(name="RMSNorm")
    class Mine(RMSNorm):
        def forward_oot(self, x, residual=None):
            return x

    made = RMSNorm(4, eps=0.5)
    assert type(made) is Mine and made.variance_epsilon == 0.5

    @PluggableLayer.register_oot(name="ReplicatedLinear")
    class MyLinear(ReplicatedLinear):
        pass

    assert type(ReplicatedLinear(2, 2)) is MyLinear


def test_a_replacement_must_be_a_subclass():
    """Python would not initialise an object of another class: it must not get that far."""
    CustomOp.register_oot(name="RMSNorm")(Op)
    with pytest.raises(TypeError, match="must be a subclass"):
        RMSNorm(4)


def test_a_name_is_given_once():
    """Two layers of one name, or two replacements of one layer, would depend on import order."""
    CustomOp.register("x")(Op)
    with pytest.raises(ValueError, match="'x' is already registered"):
        CustomOp.register("x")(OwnOp)
    Op.register_oot(name="Y")(OwnOp)
    with pytest.raises(ValueError, match="Y is already replaced"):
        Op.register_oot(name="Y")(Op)


def test_native_is_required():
    """An operation with no plain form says so instead of returning nothing."""
    with pytest.raises(NotImplementedError, match="forward_native"):
        CustomOp.forward_native(Op(), torch.ones(1))

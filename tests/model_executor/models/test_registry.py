# SPDX-License-Identifier: Apache-2.0
"""Architectures to classes: in-tree, registered by class, registered by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from vllm.model_executor.models.registry import _ModelRegistry


class Model(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def embed_input_ids(self, input_ids): ...

    def forward(self, input_ids, positions): ...

    def compute_logits(self, hidden_states): ...


@pytest.fixture
def registry() -> _ModelRegistry:
    return _ModelRegistry()


def test_classes_and_names(registry):
    """A class is served as it is; "module:Class" is imported when asked for."""
    registry.register_model("A", Model)
    registry.register_model("L", "vllm.model_executor.models.llama:LlamaForCausalLM")
    assert registry.resolve_model_cls(["X", "A"], None) == (Model, "A")
    assert registry.resolve_model_cls("L", None)[0].__name__ == "LlamaForCausalLM"
    assert registry.get_supported_archs() == {"A", "L"}
    assert registry.is_text_generation_model("A", None)


def test_a_registered_name_is_imported_late(registry):
    """A plugin registers for models that are not used: nothing of it may be imported."""
    registry.register_model("Gone", "no.such.module:Class")
    with pytest.raises(ModuleNotFoundError):
        registry.resolve_model_cls("Gone", None)


def test_unsupported_lists_what_is_supported(registry):
    """The one line a user gets must say what would work."""
    registry.register_model("A", Model)
    with pytest.raises(ValueError, match=r"X / Y is not supported \(it is not registered\); supported: A"):
        registry.resolve_model_cls(["X", "Y"], None)
    with pytest.raises(ValueError, match="names no architectures"):
        registry.resolve_model_cls([], None)


@pytest.mark.parametrize("entry", ["module", "module:", ":Class", "a:b:c", nn.Linear, 3])
def test_what_cannot_be_a_model_is_refused(registry, entry):
    """A typing error in a plugin is found when it registers, not at the first request."""
    with pytest.raises((ValueError, TypeError)):
        registry.register_model("A", entry)


def test_importing_the_registry_imports_no_torch():
    """The API process checks architectures; it must not pay for torch."""
    code = (
        "import sys; from vllm.model_executor.models import ModelRegistry; "
        "ModelRegistry.check_supported('LlamaForCausalLM'); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

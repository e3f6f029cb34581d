# SPDX-License-Identifier: Apache-2.0
"""`bind_kv_cache` beyond what upstream promises: messages, odd names, nothing half bound."""

from __future__ import annotations

import inspect
import random
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.platforms import Platform, PlatformEnum
from vllm.v1.worker import utils
from vllm.v1.worker.utils import bind_kv_cache

SELF, CROSS = "decoder.layers.0.self_attn.attn", "decoder.layers.0.encoder_attn.attn"


class RefusingPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "abacus"
    device_type = "cpu"


class AcceptingPlatform(RefusingPlatform):
    asked = 0

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        cls.asked += 1


class Layer:
    def __init__(self) -> None:
        self.kv_cache: torch.Tensor | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


@pytest.fixture
def refusing(monkeypatch):
    monkeypatch.setattr(utils, "current_platform", RefusingPlatform())


@pytest.fixture
def accepting(monkeypatch):
    monkeypatch.setattr(AcceptingPlatform, "asked", 0)
    monkeypatch.setattr(utils, "current_platform", AcceptingPlatform())


def bind(names: list[str], **kwargs) -> list[str]:
    kv_caches = {name: torch.tensor(i) for i, name in enumerate(names)}
    context = {name: Layer() for name in names}
    bound: list[torch.Tensor] = []
    bind_kv_cache(kv_caches, context, bound, **kwargs)
    assert all(context[name].kv_cache is kv_caches[name] for name in names)
    return [names[int(cache)] for cache in bound]


def test_refusal_tells_the_plugin_author_what_to_do(refusing):
    """Authors whose platforms stopped at start had only the hook's sentence, and patched around it.

    The same type as before, the hook's sentence, the index, the layers, the platform, the method.
    """
    with pytest.raises(NotImplementedError) as refusal:
        bind(["decoder.layers.1.self_attn.attn", SELF, CROSS])
    text = str(refusal.value)
    with pytest.raises(NotImplementedError) as original:
        RefusingPlatform.check_runner_kv_caches_multi_layer()
    assert text.startswith(str(original.value))
    assert "Layer index 0" in text
    assert f"{SELF}, {CROSS}" in text and "layers.1." not in text
    assert "'abacus'" in text and "test_bind_kv_cache.RefusingPlatform" in text
    assert "check_runner_kv_caches_multi_layer" in text
    assert isinstance(refusal.value.__cause__, NotImplementedError)


def test_refusal_binds_nothing(refusing):
    """A caller that catches the refusal must not find a model of which half is bound."""
    kv_caches = {name: torch.zeros(1) for name in ("decoder.layers.0.x", SELF, CROSS)}
    context = {name: Layer() for name in kv_caches}
    bound: list[torch.Tensor] = []
    with pytest.raises(NotImplementedError):
        bind_kv_cache(kv_caches, context, bound)
    assert bound == [] and all(layer.kv_cache is None for layer in context.values())


def test_other_errors_of_the_hook_pass_unchanged(monkeypatch):
    """Only the documented refusal is explained; a fault in the hook is not one."""

    class Broken(RefusingPlatform):
        @classmethod
        def check_runner_kv_caches_multi_layer(cls) -> None:
            raise KeyError("fault")

    monkeypatch.setattr(utils, "current_platform", Broken())
    with pytest.raises(KeyError, match="fault"):
        bind([SELF, CROSS])


def test_override_accepts(accepting):
    """With the override both caches of index 0 are bound, in order of appearance."""
    assert bind([CROSS, SELF]) == [CROSS, SELF]
    assert AcceptingPlatform.asked == 1


def test_no_collision_does_not_ask(accepting):
    """The hook may be expensive, or refuse: it is for collisions alone."""
    bind([f"model.layers.{i}.self_attn.attn" for i in range(4)])
    assert AcceptingPlatform.asked == 0


def test_two_integers_in_a_name(refusing):
    """`self_attn.0` in each layer has two integers and no collision: the model must start."""
    names = [f"model.layers.{i}.self_attn.0" for i in (11, 3, 0)]
    assert bind(names) == names[::-1]


def test_integer_before_the_stack(refusing):
    """The stage's number is not the layer's: taking it would make every layer collide."""
    names = [f"stages.0.layers.{i}.attn" for i in (1, 0)]
    assert bind(names) == names[::-1]


def test_two_modules_of_one_layer_collide(refusing):
    """Without `num_attn_module` two attention modules of a layer have one index."""
    with pytest.raises(NotImplementedError, match="Layer index 3 "):
        bind(["model.layers.3.self_attn.0", "model.layers.3.self_attn.1"])


def test_module_number_out_of_range():
    """A wrong `num_attn_module` would fold layer 0's module 2 onto layer 1's module 0."""
    with pytest.raises(ValueError, match="each layer has 2"):
        bind(["model.layers.0.self_attn.2.attn"], num_attn_module=2)


def test_name_without_an_index_is_bound_last(refusing):
    """A single cache outside any stack (a latent or a state) has one possible place."""
    assert bind(["latent", "model.layers.1.attn", "model.layers.0.attn"]) == [
        "model.layers.0.attn",
        "model.layers.1.attn",
        "latent",
    ]


def test_several_names_without_an_index_are_ambiguous(refusing):
    """Their order is unknown, so a runner that counts on it must not start."""
    with pytest.raises(NotImplementedError, match="No layer index stands in the names of 2 layers"):
        bind(["latent", "state"])


def test_plain_objects_get_the_attribute():
    """Layers of third-party models may hold their cache without a `bind_kv_cache` of their own."""
    cache, layer = torch.zeros(1), SimpleNamespace(kv_cache=None)
    bind_kv_cache({"layers.0": cache}, {"layers.0": layer}, [])
    assert layer.kv_cache is cache


def test_unknown_layer_and_used_list_are_refused():
    """A cache without a layer is never read; binding twice would shift every later index."""
    with pytest.raises(ValueError, match="ghost.layers.0"):
        bind_kv_cache({"ghost.layers.0": torch.zeros(1)}, {}, [])
    with pytest.raises(ValueError, match="1 KV caches are bound already"):
        bind_kv_cache({}, {}, [torch.zeros(1)])


@given(st.lists(st.tuples(st.integers(0, 200), st.sampled_from("abc")), unique=True), st.randoms())
def test_order_is_stable_by_index(layers: list[tuple[int, str]], rng: random.Random):
    """Any set of layers in any order: all bound once, sorted by index, stable within one."""
    rng.shuffle(layers)
    names = [f"{stack}.layers.{index}.attn" for index, stack in layers]
    expected = sorted(range(len(names)), key=lambda i: layers[i][0])  # sorted() is stable
    platform, utils.current_platform = utils.current_platform, AcceptingPlatform()
    try:
        assert bind(names) == [names[i] for i in expected]
    finally:
        utils.current_platform = platform


def test_no_platform_is_named_in_the_code():
    """A list of platforms in shared code is what the hook does away with."""
    source = inspect.getsource(utils)
    named = re.findall(r"is_(?:cuda|rocm|xpu|cpu|tpu|out_of_tree)|PlatformEnum|device_type", source)
    named += re.findall(r"\b(?:cuda|rocm|xpu|cpu|tpu)\b", source, flags=re.IGNORECASE)
    assert named == []

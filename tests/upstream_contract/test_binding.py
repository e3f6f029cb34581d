# SPDX-License-Identifier: Apache-2.0
"""`bind_kv_cache`, through the public interface alone: what it binds, where, in which order."""

from __future__ import annotations

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker.utils import bind_kv_cache


class Layer:
    """An attention layer as far as binding goes."""

    def __init__(self) -> None:
        self.kv_cache: torch.Tensor | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


def bind(names: list[str], **kwargs) -> list[str]:
    """Binds one cache a name and returns the names in the order in which the runner got them."""
    kv_caches = {name: torch.zeros(1) for name in names}
    context = {name: Layer() for name in names}
    runner_kv_caches: list[torch.Tensor] = []
    bind_kv_cache(kv_caches, context, runner_kv_caches, **kwargs)
    for name in names:
        assert context[name].kv_cache is kv_caches[name]
    by_identity = {id(cache): name for name, cache in kv_caches.items()}
    return [by_identity[id(cache)] for cache in runner_kv_caches]


def accept(monkeypatch, accepts: bool) -> None:
    """Makes the current platform accept or refuse several caches of one index."""

    def hook(cls) -> None:
        if not accepts:
            raise NotImplementedError("The hook's own sentence.")

    platform_cls = type(current_platform)
    monkeypatch.setattr(platform_cls, "check_runner_kv_caches_multi_layer", classmethod(hook))


def test_order_is_by_number_not_by_text():
    """`layers.10` sorts before `layers.2` as text: runners that index the list read another layer."""
    assert bind([f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0, 1)]) == [
        f"model.layers.{i}.self_attn.attn" for i in (0, 1, 2, 10)
    ]


def test_gaps_between_attention_layers():
    """Hybrid models have attention in some layers only; the list has no holes."""
    assert bind(["model.layers.28.attn", "model.layers.20.attn"]) == [
        "model.layers.20.attn",
        "model.layers.28.attn",
    ]


def test_self_and_cross_attention_of_a_decoder_layer(monkeypatch):
    """Two entries of index 0: losing one leaves a layer of every encoder-decoder model unbound."""
    accept(monkeypatch, True)
    names = ["decoder.layers.0.self_attn.attn", "decoder.layers.0.encoder_attn.attn"]
    assert bind(names) == names


def test_target_and_draft_start_at_zero(monkeypatch):
    """A speculative draft's layers start again at 0 beside the target's."""
    accept(monkeypatch, True)
    target = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    draft = ["draft_model.layers.0.self_attn.attn"]
    assert sorted(bind(target + draft)) == sorted(target + draft)


def test_the_platform_decides(monkeypatch):
    """A platform that refuses must stop the start; its sentence reaches the user."""
    accept(monkeypatch, False)
    with pytest.raises(NotImplementedError, match="The hook's own sentence."):
        bind(["decoder.layers.0.self_attn.attn", "decoder.layers.0.encoder_attn.attn"])


def test_one_layer_an_index_never_asks(monkeypatch):
    """Models without the problem must start on platforms that refuse."""
    accept(monkeypatch, False)
    assert len(bind([f"model.layers.{i}.self_attn.attn" for i in range(12)])) == 12


def test_two_attention_modules_a_layer(monkeypatch):
    """With `num_attn_module=2` both modules of a layer have indices of their own."""
    accept(monkeypatch, False)
    names = [f"model.layers.{i}.self_attn.{j}.attn" for i in (1, 0) for j in (1, 0)]
    assert bind(names, num_attn_module=2) == sorted(names)

# SPDX-License-Identifier: Apache-2.0
"""Several KV caches of one layer index: what the platform answers, and what `bind_kv_cache` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from vllm_platform_kit.findings import Finding
from vllm_platform_kit.target import Target

HOOK = "check_runner_kv_caches_multi_layer"
ONE_AN_INDEX = tuple(f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0, 1))
SAME_INDEX = {
    "self- and cross-attention": (
        "decoder.layers.0.self_attn.attn",
        "decoder.layers.0.encoder_attn.attn",
        "decoder.layers.1.self_attn.attn",
        "decoder.layers.1.encoder_attn.attn",
    ),
    "a model and its draft": (
        "model.layers.0.self_attn.attn",
        "model.layers.1.self_attn.attn",
        "draft_model.layers.0.self_attn.attn",
    ),
}


@dataclass(frozen=True)
class Answer:
    """What the hook did: accepts, or refuses with `refusal`; or a finding."""

    refusal: str = ""
    finding: Finding | None = None


def ask(target: Target) -> Answer:
    """The hook's answer."""
    subject = f"{target.platform_cls.__qualname__}.{HOOK}"
    try:
        said = getattr(target.platform_cls(), HOOK)()
    except NotImplementedError as refusal:
        return Answer(str(refusal) or "NotImplementedError")
    except Exception as error:
        what = f"it raised {type(error).__name__}: {error}"
        return Answer(finding=Finding("BINDING_ANSWER", subject, what))
    if said is not None:
        what = f"it returned {said!r}; whatever is returned is taken for yes"
        return Answer(finding=Finding("BINDING_ANSWER", subject, what))
    return Answer()


def check_binding(names: tuple[str, ...], refusal: str) -> Iterator[Finding]:
    """Binds a cache to each layer as the engine does. `refusal`: the platform's, if it has one."""
    from vllm.v1.worker.utils import bind_kv_cache

    caches = {name: torch.zeros(1) for name in names}
    layers = {name: _Layer() for name in names}
    bound: list[torch.Tensor] = []
    try:
        bind_kv_cache(caches, layers, bound)
    except NotImplementedError as error:
        if not refusal:
            yield Finding("BINDING_ANSWER", "bind_kv_cache", f"refused all the same: {error}")
        return
    if refusal:
        what = f"accepted although {HOOK} refuses"
        yield Finding("BINDING_ANSWER", "bind_kv_cache", what)
    for name in names:
        cache = layers[name].kv_cache
        cache = cache[0] if isinstance(cache, list) else cache
        if cache is not caches[name]:
            yield Finding("BINDING_CACHE", f"layer {name}", "it is bound to another layer's cache")
    if sorted(map(id, bound)) != sorted(map(id, caches.values())):
        yield Finding("BINDING_CACHE", "the runner", "its list has not each cache once")


class _Layer(SimpleNamespace):
    kv_cache: object = None

    def bind_kv_cache(self, kv_cache: object) -> None:
        self.kv_cache = kv_cache

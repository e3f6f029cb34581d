# SPDX-License-Identifier: Apache-2.0
"""What the guard says of the caches that KV connectors are handed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("guard_path")
PAGES, TOKENS, HEADS, SIZE = 6, 4, 2, 8
NAMES = ["layers.0.attn", "layers.1.attn"]


class Backend:
    """Logical shapes by name, in memory as they are."""

    def __init__(self, *roles: str) -> None:
        self.roles = roles

    def get_name(self) -> str:
        return "ANY"

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        sizes = {"block": num_blocks, "kv": 2, "head": num_kv_heads, "token": block_size}
        return tuple(sizes.get(role, head_size) for role in self.roles)

    def get_kv_cache_stride_order(self):
        raise NotImplementedError


KV_FIRST = Backend("kv", "block", "token", "head", "content")
FUSED = Backend("block", "head", "token", "content")


def caches_of(backend: Backend, ratio: int = 1) -> dict[str, torch.Tensor]:
    shape = backend.get_kv_cache_shape(PAGES * ratio, TOKENS // ratio, HEADS, SIZE)
    return {name: torch.zeros(shape) for name in NAMES}


def examine(backend: Backend, bound, *registered, transferred: bool = True):
    """The report of a worker with these caches, whose connector got `registered`."""
    from vllm_kv_guard.connectors import Registration
    from vllm_kv_guard.findings import examine as look

    layers = {n: SimpleNamespace(kv_cache=c, attn_backend=backend) for n, c in bound.items()}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    spec = SimpleNamespace(num_kv_heads=HEADS)
    group = SimpleNamespace(
        layer_names=list(bound), kv_cache_spec=spec, enable_kv_transfer=transferred
    )
    config = SimpleNamespace(num_blocks=PAGES, kv_cache_groups=[group])
    return look(worker, config, [Registration("Mover", caches) for caches in registered])


@pytest.mark.parametrize("backend", [KV_FIRST, FUSED], ids=["K/V-first", "fused"])
def test_other_views_of_the_same_pages_are_right(backend):
    """What a connector needs is a page's bytes by the page's number: permuted, flattened, or with
    pages of several kernel blocks taken whole. A guard that refuses those stops what works."""
    bound = caches_of(backend, ratio=2)
    block = backend.roles.index("block")
    inner = [d for d in range(len(backend.roles)) if d != block]
    assert examine(backend, bound, bound).is_sound
    permuted = {name: cache.permute(block, *inner) for name, cache in bound.items()}
    assert examine(backend, bound, permuted).is_sound
    whole = {n: c.unflatten(block, (PAGES, 2)) for n, c in bound.items()}
    assert examine(backend, bound, whole).is_sound
    report = examine(backend, bound, {n: c.view(torch.int8) for n, c in bound.items()})
    assert report.is_sound and "handed to Mover" in report.line()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c[: PAGES - 1], "no dimension of which is the 6 pages"),
        (lambda c: torch.zeros_like(c), "other memory than it uses"),
        (lambda c: c[:, :1], "other bytes"),
        (lambda c: c.as_strided(c.shape, (c.stride(0) // 2, *c.stride()[1:])), "that is no cache"),
        (lambda c: c.flatten()[SIZE:][: (PAGES - 1) * c[0].numel()].view(PAGES - 1, -1),
         "no dimension of which is the 6 pages"),
        (lambda c: c[:0], "an empty cache"),
    ],
    ids=["fewer pages", "a copy", "one head", "overlapping blocks", "shifted", "empty"],
)  # fmt: skip
def test_what_is_not_the_layers_own_is_found(change, said):
    """One layer's wrong view among right ones: it would be sent as another request's bytes."""
    bound = caches_of(FUSED)
    handed = bound | {NAMES[1]: change(bound[NAMES[1]])}
    report = examine(FUSED, bound, handed)
    (conflict,) = report.conflicts
    assert said in conflict
    assert conflict.startswith("connector Mover was handed") and "layers.1.attn" in conflict


def test_what_is_wrong_in_each_of_many_layers_is_said_a_few_times():
    """A log line of a hundred layers hides what it says; all stay in the report."""
    bound = {f"layers.{i}.attn": torch.zeros(PAGES, HEADS, TOKENS, SIZE) for i in range(9)}
    report = examine(FUSED, bound, {n: torch.zeros_like(c) for n, c in bound.items()})
    assert len(report.conflicts) == 9 and report.line().count("other memory") == 4
    assert report.line().endswith("and 5 more like these")


def test_swapped_and_missing_layers():
    """Each layer has to be handed its own memory, and all of them, or half a page is sent."""
    bound = caches_of(FUSED)
    swapped = dict(zip(NAMES, reversed(bound.values())))
    assert len(examine(FUSED, bound, swapped).conflicts) == 2
    one, other = ({name: bound[name]} for name in NAMES)
    assert "handed nothing for layer layers.1.attn" in examine(FUSED, bound, one).line()
    assert examine(FUSED, bound, one, other).is_sound, "in two calls"
    assert examine(FUSED, bound, one, transferred=False).is_sound, "not meant for connectors"


def test_one_tensor_of_all_layers():
    """Cross-layer pools: a page of it holds that page of each layer, wherever in it."""
    pool = torch.zeros(PAGES, 2, HEADS, TOKENS, SIZE)
    bound = dict(zip(NAMES, pool.unbind(1)))
    assert examine(FUSED, bound, pool).is_sound
    assert examine(FUSED, bound, pool.transpose(0, 1)).is_sound
    conflicts = examine(FUSED, bound, pool[:, :1]).conflicts
    assert len(conflicts) == 1 and "layers.1.attn" in conflicts[0]
    assert len(examine(FUSED, bound, torch.zeros_like(pool)).conflicts) == 2


def test_registrations_are_noted_and_the_connector_is_left_as_it_was():
    """On this tree's own connector base class, which is upstream's interface: also of connectors that
    another one makes for itself. Without a connector configured nothing is touched."""
    from vllm_kv_guard.connectors import watch

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

    class Inner(KVConnectorBase_V1):
        __abstractmethods__ = frozenset()
        handed = None

        def register_kv_caches(self, kv_caches):
            self.handed = kv_caches

    class Outer(Inner):
        def __init__(self, *args):
            super().__init__(*args)
            self.inner = Inner(*args)

        def register_kv_caches(self, kv_caches):
            self.inner.register_kv_caches({"renamed": kv_caches["a"]})

    for cls in (Inner, Outer):
        cls.__abstractmethods__ = frozenset()
    transfer = SimpleNamespace(kv_connector="Outer", kv_connector_extra_config={})
    config = SimpleNamespace(kv_transfer_config=transfer)
    constructor = KVConnectorBase_V1.__init__
    with watch(config) as registrations:
        outer = Outer(config, KVConnectorRole.WORKER, None)
        outer.register_kv_caches({"a": 1})
    assert [(r.connector, r.caches) for r in registrations] == [
        ("Outer", {"a": 1}), ("Inner", {"renamed": 1}),
    ]  # fmt: skip
    assert outer.inner.handed == {"renamed": 1}
    assert KVConnectorBase_V1.__init__ is constructor
    assert "register_kv_caches" not in vars(outer) and "register_kv_caches" not in vars(outer.inner)
    with watch(SimpleNamespace(kv_transfer_config=None)) as registrations:
        assert KVConnectorBase_V1.__init__ is constructor and registrations == []

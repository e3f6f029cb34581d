# SPDX-License-Identifier: Apache-2.0
"""Of what NIXL would read: a page whose bytes are another's is found, wherever that went wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.kit.broken import backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import LayerBundle
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.registration import plan_registration
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

TOKENS = 16


def layers_of(*kinds: type, ratio: int = 1) -> list:
    from vllm_platform_kit.views import make_views

    return make_views(list(kinds), 2, 32, TOKENS, ratio)


def recorder_of(layers: list):
    """As after the registration of these caches by this tree's connector."""
    from vllm_platform_kit.registration import Recorder
    from vllm_platform_kit.views import NUM_PAGES

    names = [layer.name for layer in layers]
    size = layers[0].tensor.untyped_storage().nbytes()
    config = KVCacheConfig(
        num_blocks=NUM_PAGES,
        kv_cache_tensors=[KVCacheTensor(size=size, shared_by=names)],
        kv_cache_groups=[KVCacheGroupSpec([one.name], one.spec) for one in layers],
    )
    tensors = {layer.name: layer.tensor for layer in layers}
    plan = plan_registration(tensors, config, {layer.name: layer.backend for layer in layers})
    regions = [(region.address, region.nbytes) for region in plan.regions]
    worker = SimpleNamespace(registration=plan)
    return Recorder(regions, connector=SimpleNamespace(connector_worker=worker))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("other", [backends.Sound, backends.KVFirst])
def test_what_is_right(kit, other, ratio):
    layers = layers_of(backends.Sound, other, ratio=ratio)
    found, (note,) = recorder_of(layers).check(layers)
    assert found == [] and "as the connector would read them" in note


@pytest.mark.parametrize("end", ["remote", "local"])
def test_reads_of_other_pages(kit, end, monkeypatch):
    """In the very function that makes reads of pages: a plan that is right proves nothing of it."""
    layers = layers_of(backends.Sound, backends.KVFirst)
    runs, page = LayerBundle.runs, layers[0].geometry.pitch

    def shifted(bundle, pieces):
        right = runs(bundle, pieces)
        return right._replace(**{end: getattr(right, end) + page})

    monkeypatch.setattr(LayerBundle, "runs", shifted)
    found, _ = recorder_of(layers).check(layers)
    assert [one.code for one in found] == ["CONNECTOR_PAGES"] * 2
    assert "page 1 is bytes" in found[0].what


def test_pages_by_the_first_dimension(kit):
    """As connectors do that name pages when they register: K for page 0, V for page 1."""
    from vllm_platform_kit.registration import Recorder, page_runs

    (layer,) = layers_of(backends.KVFirst)
    storage = layer.tensor.untyped_storage()
    start, nbytes = storage.data_ptr(), storage.nbytes()
    halves = [(start, nbytes // 2), (start + nbytes // 2, nbytes // 2)]
    wrong = Recorder([(start, nbytes)], halves, SimpleNamespace())
    assert [one.code for one in wrong.check([layer])[0]] == ["CONNECTOR_PAGES"]
    named = [run for page in range(layer.geometry.num_pages) for run in page_runs(layer, page)]
    right = Recorder([(start, nbytes)], named, SimpleNamespace())
    assert right.check([layer])[0] == []
    outside = Recorder([(start, nbytes // 2)], named, SimpleNamespace())
    assert [one.code for one in outside.check([layer])[0]] == ["CONNECTOR_REGIONS"]

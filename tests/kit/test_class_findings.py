# SPDX-License-Identifier: Apache-2.0
"""Faults in a platform's class or in what its backends declare: each is found, by its own name and by no
other. A kit that finds nothing, or always something, is worth nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.kit.broken import backends

PLATFORMS = "tests.kit.broken.platforms"
CLASS_FAULTS = {
    "Misspelt": ("HOOK_UNKNOWN", "check_runner_kv_caches_multi_layer was meant"),
    "WrongDevice": ("HOOK_DEVICE_INDEX", "device 0 is 5, not 0"),
    "AnswersNo": ("BINDING_ANSWER", "it returned False; whatever is returned is taken for yes"),
    "AnswersWithAnError": ("BINDING_ANSWER", "it raised TypeError"),
    "NoClassmethod": ("HOOK_KIND", "a method of instances, in Platform it is a classmethod"),
    "MethodForProperty": ("HOOK_KIND", "a classmethod, in Platform it is a property"),
    "FewParameters": ("HOOK_SIGNATURE", "it does not take num_heads"),
    "ForgetsToReturn": ("HOOK_VALUE", "None is not a number of tokens"),
    "Raises": ("HOOK_RAISES", "AttributeError"),
    "NoKind": ("PLATFORM_ATTRIBUTE", "_enum is not set"),
    "TakenForCpu": ("PLATFORM_ATTRIBUTE", "_enum is CPU"),
    "NoSuchBackend": ("BACKEND", "has no attribute 'Missing'"),
    "HalfABackend": ("BACKEND", "get_impl_cls"),
}
# Faults that make others: a call with too few parameters is refused as well.
FOLLOWING = {"FewParameters": "HOOK_RAISES", "MethodForProperty": "HOOK_VALUE"}


def findings_of(name: str) -> list:
    """Of all checks that need no engine and no view."""
    from vllm_platform_kit import binding, hooks
    from vllm_platform_kit.backends import selectable_backends
    from vllm_platform_kit.target import Target

    target = Target(f"{PLATFORMS}.{name}")
    found = [*hooks.check_attributes(target), *hooks.check_names(target)]
    found += [*hooks.check_overrides(target), *hooks.check_answers(target)]
    answer = binding.ask(target)
    return [*found, *([answer.finding] if answer.finding else []), *selectable_backends(target)[1]]


def test_a_sound_class_has_none(kit):
    """Nor has a built-in platform."""
    from vllm_platform_kit import hooks
    from vllm_platform_kit.target import Target

    assert findings_of("SoundPlatform") == []
    target = Target("vllm.platforms.cpu.CpuPlatform")
    checks = (hooks.check_attributes, hooks.check_names, hooks.check_overrides, hooks.check_answers)
    assert [one for check in checks for one in check(target)] == []


@pytest.mark.parametrize("name", CLASS_FAULTS)
def test_fault_in_a_class(kit, name):
    code, words = CLASS_FAULTS[name]
    found = findings_of(name)
    mine = [one for one in found if one.code == code]
    assert mine and words in mine[0].line and "To do: " in mine[0].line
    assert {one.code for one in found} <= {code, FOLLOWING.get(name)}


def test_hooks_are_listed_with_their_owner(kit):
    """Each once: the report is an author's list of what there is to override."""
    from vllm_platform_kit.hooks import list_hooks
    from vllm_platform_kit.target import Target

    from vllm.platforms import Platform

    hooks = {hook.name: hook for hook in list_hooks(Target(f"{PLATFORMS}.Misspelt"))}
    assert set(hooks) == {name for name in vars(Platform) if not name.startswith("_")} - {
        name for name, value in vars(Platform).items() if isinstance(value, str | list)
    }
    assert hooks["support_hybrid_kv_cache"].owner == f"{PLATFORMS}.SoundPlatform"
    multi_layer = hooks["check_max_model_len"]
    assert multi_layer.is_default and "the model's length is served" in multi_layer.line


def test_every_sentence_is_of_a_hook(kit):
    """Guards against sentences about hooks that no engine has: these are upstream's or here."""
    from vllm_platform_kit.hook_notes import WITHOUT

    from vllm.platforms import Platform

    upstream_only = {
        "is_zen_cpu", "get_nixl_supported_devices", "get_nixl_memory_type",
        "update_block_size_for_backend",
        "get_punica_wrapper", "get_infinity_values", "can_update_inplace", "use_custom_allreduce",
        "get_vit_attn_backend", "get_supported_vit_attn_backends",
    }  # fmt: skip
    assert set(WITHOUT) - set(vars(Platform)) == upstream_only
    hooks = {name for name, value in vars(Platform).items() if not isinstance(value, str | list)}
    assert {name for name in hooks if not name.startswith("_")} <= set(WITHOUT)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (backends.WrongBlockDim, "get_kv_cache_block_dim says 0"),
        (backends.WrongOrder, "stride order (0, 1, 3, 2, 4) does not permute the 4 dimensions"),
    ],
)
def test_declarations_that_contradict_each_other(kit, backend, words):
    from vllm_platform_kit.backends import declared

    with pytest.raises(ValueError) as refused:
        declared(backend)
    assert words in str(refused.value)


def test_a_block_size_without_a_shape(kit):
    """Listed and refused: vLLM chooses from the list."""
    from vllm_platform_kit.outcomes import of_declared_sizes

    assert of_declared_sizes(backends.Sound) == []
    (one,) = of_declared_sizes(backends.ListsTooMuch)
    assert one.code == "BLOCK_SIZE_DECLARED" and "it lists 48" in one.line


def test_a_cache_of_another_shape(kit):
    """One that is not as its backend says, and one that is no whole number of blocks a page."""
    from vllm_platform_kit.engine_caches import Observed
    from vllm_platform_kit.views import NUM_PAGES, make_views

    (layer,) = make_views([backends.Sound], 2, 32, 16, 1)
    assert list(layer.misplaced()) == []
    more = replace(layer, spec=replace(layer.spec, num_kv_heads=4))
    (one,) = [one for one in more.misplaced() if one.code == "LAYOUT_SHAPE"]
    assert "declared is" in one.line
    bound = SimpleNamespace(kv_cache=layer.tensor[:-1], attn_backend=backends.Sound)
    observed = Observed([], [], [])
    observed._add("a", 0, layer.spec, bound, SimpleNamespace(num_blocks=NUM_PAGES))
    assert [one.code for one in observed.findings] == ["LAYOUT_SHAPE"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("other", [backends.Sound, backends.KVFirst])
def test_pairs_that_the_engine_aligns(kit, other, layout):
    from vllm_platform_kit.alignment import HEADS, RATIOS, check_pair

    outcome = check_pair(backends.Sound, other, layout)
    assert outcome.findings == [] and outcome.num_right == len(HEADS) * len(RATIOS)
    assert outcome.drawing.startswith("<svg") and "passed, no page holds" in outcome.drawing


def test_a_pair_left_unaligned(kit, monkeypatch):
    """The same pair where nobody aligns: named, with the pages, and drawn."""
    from vllm_platform_kit.alignment import check_pair

    from vllm.v1.worker.gpu import attn_utils

    monkeypatch.setattr(attn_utils, "_align_mixed_attention_kv_cache_views", lambda *args: None)
    outcome = check_pair(backends.Sound, backends.KVFirst, "NHD")
    assert {one.code for one in outcome.findings} == {"ALIGNMENT_PAGES"} and not outcome.num_right
    assert "page 0 of layer layers.0.attn and page" in outcome.findings[0].line
    assert "share bytes of one allocation" in " ".join(outcome.drawing.split())


def test_a_pair_aligned_by_sizes(kit, monkeypatch):
    """Two heads taken for K and V: pages are apart, but heads are where no kernel looks."""
    from vllm_platform_kit.alignment import check_pair

    from vllm.v1.worker.gpu import attn_utils

    def by_sizes(groups, kv_caches, *args):
        for cache in kv_caches.values():
            if cache.shape[1] == 2:
                half = cache[0].numel() // 2
                cache.as_strided_(cache.shape, (half, len(cache) * half, cache.shape[3], 1))

    monkeypatch.setattr(attn_utils, "_align_mixed_attention_kv_cache_views", by_sizes)
    codes = {one.code for one in check_pair(backends.Sound, backends.KVFirst, "NHD").findings}
    assert "ALIGNMENT_STRIDES" in codes


def test_a_crash_is_no_refusal(kit, monkeypatch):
    """An assertion about dimension 1 tells a user nothing; a ValueError with advice does."""
    from vllm_platform_kit.alignment import check_pair

    from vllm.v1.worker.gpu import attn_utils

    def fail(*args):
        raise error

    monkeypatch.setattr(attn_utils, "_align_mixed_attention_kv_cache_views", fail)
    error = AssertionError("dim 1 is 3")
    assert {one.code for one in check_pair(backends.Sound, backends.KVFirst, "NHD").findings} == {
        "ALIGNMENT_CRASH"
    }
    error = ValueError("layers a and b cannot share; set --attention-backend")
    outcome = check_pair(backends.Sound, backends.KVFirst, "NHD")
    assert not outcome.findings and not outcome.num_right and "refused" in outcome.notes[0]


def test_binding_that_loses_a_cache(kit, monkeypatch):
    """As the check must find in an engine whose list of caches is by index."""
    from vllm_platform_kit import binding

    from vllm.v1.worker import utils

    def by_index(caches, context, runner_kv_caches, num_attn_module=1):
        last = {name.split(".")[2]: cache for name, cache in caches.items()}
        for name in caches:
            context[name].bind_kv_cache(last[name.split(".")[2]])
        runner_kv_caches.extend(last.values())

    monkeypatch.setattr(utils, "bind_kv_cache", by_index)
    assert list(binding.check_binding(binding.ONE_AN_INDEX, "")) == []
    found = list(binding.check_binding(binding.SAME_INDEX["self- and cross-attention"], ""))
    assert {one.code for one in found} == {"BINDING_CACHE"}
    (one, *_) = found
    assert "decoder.layers.0.self_attn.attn: it is bound to another layer's cache" in one.line

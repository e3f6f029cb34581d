# SPDX-License-Identifier: Apache-2.0
"""`Platform.check_runner_kv_caches_multi_layer`, through the public interface alone."""

from __future__ import annotations

import importlib

import pytest

from vllm.platforms import Platform, PlatformEnum

SENTENCE = (
    "Multiple attention layers with the same layer index are not supported on the current platform."
)
BUILT_IN = [
    ("vllm.platforms.cpu", "CpuPlatform"),
    ("vllm.platforms.cuda", "CudaPlatform"),
    ("vllm.platforms.rocm", "RocmPlatform"),
    ("vllm.platforms.xpu", "XPUPlatform"),
]


class OutOfTreePlatform(Platform):
    """A platform whose author never heard of the hook."""

    _enum = PlatformEnum.OOT
    device_name = "oot"
    device_type = "cpu"


def test_base_refuses():
    """A platform that says nothing must not be taken for fit: the sentence is what users report."""
    for platform in (Platform, OutOfTreePlatform, OutOfTreePlatform()):
        with pytest.raises(NotImplementedError) as refusal:
            platform.check_runner_kv_caches_multi_layer()
        assert str(refusal.value) == SENTENCE


@pytest.mark.parametrize(("module", "name"), BUILT_IN)
def test_built_in_platforms_accept(module, name):
    """Encoder-decoder models must start on each; callable on the class and on an instance."""
    platform_cls = getattr(importlib.import_module(module), name)
    assert platform_cls.check_runner_kv_caches_multi_layer() is None
    assert platform_cls().check_runner_kv_caches_multi_layer() is None


@pytest.mark.parametrize(("module", "name"), BUILT_IN)
def test_platforms_derived_from_a_built_in_one_accept(module, name):
    """Several out-of-tree platforms derive from a built-in one and rely on inheriting this."""
    platform_cls = getattr(importlib.import_module(module), name)
    derived = type("Derived", (platform_cls,), {"_enum": PlatformEnum.OOT})
    assert derived.check_runner_kv_caches_multi_layer() is None


def test_an_out_of_tree_platform_accepts_by_overriding():
    """The one step that plugin authors were asked to take."""

    class Fit(OutOfTreePlatform):
        @classmethod
        def check_runner_kv_caches_multi_layer(cls) -> None:
            return None

    assert Fit.check_runner_kv_caches_multi_layer() is None

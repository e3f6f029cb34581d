# SPDX-License-Identifier: Apache-2.0
"""Connectors are found by name, built in or not, and refused in words that help."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    SupportsHMA,
    supports_hma,
)


class OneGroup(KVConnectorBase_V1):
    pass


class AllGroups(KVConnectorBase_V1, SupportsHMA):
    pass


@pytest.fixture
def out_of_tree(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("a_connector_of_ours")
    module.OneGroup = OneGroup
    module.AllGroups = AllGroups
    module.NoConnector = dict
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def config(name: str, module: str | None = None) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module
    )


def test_out_of_tree(out_of_tree: str):
    found = KVConnectorFactory.get_connector_class(config("OneGroup", out_of_tree))
    assert found is OneGroup
    assert not supports_hma(found)
    assert KVConnectorFactory.supports_hma_config(config("AllGroups", out_of_tree))


def test_registered(monkeypatch: pytest.MonkeyPatch, out_of_tree: str):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    KVConnectorFactory.register_connector("Ours", out_of_tree, "AllGroups")
    assert KVConnectorFactory.get_connector_class(config("Ours")) is AllGroups
    with pytest.raises(ValueError, match="'Ours' is registered already"):
        KVConnectorFactory.register_connector("Ours", out_of_tree, "OneGroup")


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="'Nixl'; supported: .*NixlConnector.*module_path"):
        KVConnectorFactory.get_connector_class(config("Nixl"))


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("OneGroup", "no_such_module_here", "no_such_module_here cannot be imported"),
        ("NoSuchClass", "a_connector_of_ours", "no KV connector class 'NoSuchClass'"),
        ("NoConnector", "a_connector_of_ours", "no KV connector class 'NoConnector'"),
    ],
)
def test_wrong_module_path(out_of_tree: str, name: str, module: str, words: str):
    """Guards against a traceback, or a class that is none, coming up only in the first step."""
    with pytest.raises(ValueError, match=words):
        KVConnectorFactory.get_connector_class(config(name, module))

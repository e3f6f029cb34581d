# SPDX-License-Identifier: Apache-2.0
"""Connectors by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase, KVConnectorBaseType
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class KVConnectorFactory:
    """Names of connectors, and where their classes are. Modules are imported when asked for."""

    _registry: dict[str, tuple[str, str]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Makes a connector known.

        Raises:
            ValueError: the name is taken.
        """
        if name in cls._registry:
            raise ValueError(f"a connector called {name!r} is registered already")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def create_connector(
        cls, config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVConnectorBase:
        """The scheduler's or the worker's half of the connector that `config` names.

        Raises:
            ValueError: there is no such connector, or it is made for one KV cache group and the
                model has several.
        """
        kv_transfer_config = config.kv_transfer_config
        if kv_transfer_config is None:
            raise ValueError("kv_transfer_config is not set, so there is no connector to make")
        connector_cls = cls.get_connector_class(kv_transfer_config)
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups > 1 and not supports_hma(connector_cls):
            raise ValueError(
                f"{connector_cls.__name__} moves the pages of one KV cache group and the model has "
                f"{num_groups}; it would have to implement SupportsHMA "
                "(request_finished_all_groups)"
            )
        logger.info("KV connector %s for the %s", connector_cls.__name__, role.name.lower())
        return connector_cls(config, role, kv_cache_config)

    @classmethod
    def get_connector_class_by_name(cls, connector_name: str) -> type[KVConnectorBaseType]:
        """The class of a registered connector.

        Raises:
            ValueError: none is registered under that name.
        """
        if connector_name not in cls._registry:
            raise ValueError(
                f"there is no KV connector {connector_name!r}; supported: "
                f"{', '.join(sorted(cls._registry))}, or a class of your own with "
                "kv_connector_module_path"
            )
        return _load(*cls._registry[connector_name])

    @classmethod
    def get_connector_class(
        cls, kv_transfer_config: KVTransferConfig
    ) -> type[KVConnectorBaseType]:
        """The class that `kv_transfer_config` names.

        Raises:
            ValueError: there is no such connector.
        """
        name = kv_transfer_config.kv_connector
        if name is None:
            raise ValueError("kv_transfer_config names no kv_connector")
        module_path = kv_transfer_config.kv_connector_module_path
        if module_path is None:
            return cls.get_connector_class_by_name(name)
        return _load(module_path, name)

    @classmethod
    def supports_hma_config(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether that connector moves the pages of several KV cache groups."""
        return supports_hma(cls.get_connector_class(kv_transfer_config))


def _load(module_path: str, class_name: str) -> type[KVConnectorBaseType]:
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ValueError(
            f"KV connector {class_name}: module {module_path} cannot be imported ({error})"
        ) from error
    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase)):
        raise ValueError(f"module {module_path} has no KV connector class {class_name!r}")
    return found


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
KVConnectorFactory.register_connector(
    "NixlConnector", f"{_V1}.nixl.connector", "NixlConnector"
)
KVConnectorFactory.register_connector(
    "ExampleConnector", f"{_V1}.example_connector", "ExampleConnector"
)

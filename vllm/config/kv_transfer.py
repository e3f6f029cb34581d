# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import uuid
from dataclasses import field
from typing import Any, Literal, get_args

from pydantic import Field

from vllm.config.utils import config, hash_factors
from vllm.logger import init_logger

logger = init_logger(__name__)

KVProducer = Literal["kv_producer", "kv_both"]
KVConsumer = Literal["kv_consumer", "kv_both"]
KVRole = Literal[KVProducer, KVConsumer]

# Upstream's fields that no connector here reads.
_WITHOUT_EFFECT = {
    "kv_buffer_size": 1e9,
    "kv_rank": None,
    "kv_parallel_size": 1,
    "kv_ip": "127.0.0.1",
    "kv_port": 14579,
    "enable_permute_local_kv": False,
}


def kv_buffer_device_default_factory() -> str:
    """The device that the model runs on."""
    from vllm.platforms import current_platform

    return current_platform.device_type


@config
class KVTransferConfig:
    """How keys and values travel between engines, and by which connector."""

    kv_connector: str | None = None
    """Name of the connector's class: a registered one, or one of `kv_connector_module_path`."""
    engine_id: str | None = None
    """Name of this engine to its peers, unique among them; made up if left out."""
    kv_buffer_device: str = field(default_factory=kv_buffer_device_default_factory)
    """Device whose memory is transferred; left out: the one that the model runs on."""
    kv_buffer_size: float = Field(default=1e9, gt=0)
    """Upstream's field; has no effect here."""
    kv_role: KVRole | None = None
    """kv_producer: others load what this engine computes; kv_consumer: this one loads; kv_both."""
    kv_rank: int | None = None
    """Upstream's field; has no effect here."""
    kv_parallel_size: int = Field(default=1, ge=1)
    """Upstream's field; has no effect here."""
    kv_ip: str = "127.0.0.1"
    """Upstream's field; has no effect here."""
    kv_port: int = 14579
    """Upstream's field; has no effect here."""
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the connector, read by it alone."""
    kv_connector_module_path: str | None = None
    """Module that holds the connector's class, for one that is not built in."""
    enable_permute_local_kv: bool = False
    """Upstream's field; has no effect here: unequal layouts are always converted."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    """When pages cannot be loaded: compute them here, or end the request with an error."""

    def __post_init__(self) -> None:
        self.engine_id = self.engine_id or str(uuid.uuid4())
        if self.kv_connector is None:
            given = self.kv_role or self.kv_connector_module_path
            if given is not None:
                raise ValueError(
                    f"kv_transfer_config has {given!r} but no kv_connector: name the connector's "
                    "class, for example NixlConnector"
                )
        elif self.kv_role is None:
            raise ValueError(
                f"kv_transfer_config names {self.kv_connector} but no kv_role; supported: "
                + ", ".join(sorted(_roles(KVRole)))
            )
        for name, default in _WITHOUT_EFFECT.items():
            if getattr(self, name) != default:
                logger.warning("kv_transfer_config: %s has no effect", name)

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation: nothing here does."""
        return hash_factors({})

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether there is a connector at all."""
        return self.kv_connector is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether others load what this engine computes."""
        return self.kv_connector is not None and self.kv_role in _roles(KVProducer)

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine loads what others computed."""
        return self.kv_connector is not None and self.kv_role in _roles(KVConsumer)

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """An option of the connector, `default` if it is not given."""
        return self.kv_connector_extra_config.get(key, default)


def _roles(literal: Any) -> frozenset[str]:
    return frozenset(get_args(literal))

# SPDX-License-Identifier: Apache-2.0
"""What a KV connector counts, as Prometheus metrics and as a line in the log."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)


def _connector_cls(vllm_config: VllmConfig) -> type[KVConnectorBase_V1] | None:
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return None
    return KVConnectorFactory.get_connector_class(config)


class KVConnectorMetrics:
    """The connector's Prometheus metrics, if there is one that has some. Their names should begin
    with `vllm:`, as those of an engine before in this process are forgotten by that."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        labelnames: tuple[str, ...],
        labelvalues: tuple[str, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._metrics: KVConnectorPromMetrics | None = None
        connector_cls = _connector_cls(vllm_config)
        if connector_cls is not None:
            self._metrics = connector_cls.build_prom_metrics(
                vllm_config,
                {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)},
                list(labelnames),
                {0: list(labelvalues)},
            )

    def observe(self, data: dict[str, Any] | None) -> None:
        """Takes in what came with a step's statistics."""
        if data is not None and self._metrics is not None:
            self._metrics.observe(data, 0)


class KVConnectorLogging:
    """What the connector counted since the last line."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._connector_cls = _connector_cls(vllm_config)
        self._stats: KVConnectorStats | None = None

    def observe(self, data: dict[str, Any] | None) -> None:
        """Takes in what came with a step's statistics."""
        if data is None or self._connector_cls is None:
            return
        more = self._connector_cls.build_kv_connector_stats(data)
        if more is not None:
            self._stats = more if self._stats is None else self._stats.aggregate(more)

    def take_line(self) -> str | None:
        """The text to log; None if nothing was counted."""
        stats, self._stats = self._stats, None
        if stats is None or stats.is_empty():
            return None
        return ", ".join(f"{name}: {value}" for name, value in stats.reduce().items())

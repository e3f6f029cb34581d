# SPDX-License-Identifier: Apache-2.0
"""What a connector counts reaches Prometheus and the log, each thing once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from vllm.config import CacheConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.kv_connector import KVConnectorLogging
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.prometheus import PrometheusMetrics
from vllm.v1.metrics.stats import SchedulerStats


class Stats(KVConnectorStats):
    def reset(self) -> None:
        self.data = {"bytes": []}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        self.data["bytes"] = self.data["bytes"] + other.data["bytes"]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {"transfers": len(self.data["bytes"]), "bytes": sum(self.data["bytes"])}

    def is_empty(self) -> bool:
        return not self.data["bytes"]


class PromMetrics(KVConnectorPromMetrics):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._transfers = self.make_per_engine(
            self._counter_cls("vllm:t_transfers", "Transfers.", labelnames=self._labelnames)
        )
        self._bytes = self.make_per_engine(
            self._histogram_cls(
                "vllm:t_bytes", "Bytes.", labelnames=self._labelnames, buckets=[10, 100]
            )
        )

    def observe(self, transfer_stats_data, engine_idx=0) -> None:
        for nbytes in transfer_stats_data["bytes"]:
            self._transfers[engine_idx].inc()
            self._bytes[engine_idx].observe(nbytes)


class CountingConnector(KVConnectorBase_V1):
    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Stats(data) if data is not None else None

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        assert set(metric_types) >= {Counter, Histogram}
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class SilentConnector(KVConnectorBase_V1):
    pass


def config(name: str | None) -> SimpleNamespace:
    """What the loggers read of a VllmConfig."""
    transfer = name and KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=__name__
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="name", max_model_len=64),
        cache_config=CacheConfig(block_size=16),
        kv_transfer_config=transfer or None,
    )


def test_prometheus():
    """With the labels that every metric has, in the registry that the others are in; a second
    engine's metrics take the place of the first's."""
    registry = CollectorRegistry()
    PrometheusMetrics(config("CountingConnector"), registry=registry)
    metrics = PrometheusMetrics(config("CountingConnector"), registry=registry)
    for data in ({"bytes": [4, 50]}, None, {"bytes": [5000]}):
        metrics.record_scheduler(SchedulerStats(kv_connector_stats=data))
    text = generate_latest(registry).decode()
    labels = 'engine="0",model_name="name"'
    assert f"vllm:t_transfers_total{{{labels}}} 3.0" in text
    assert f'vllm:t_bytes_bucket{{engine="0",le="10.0",model_name="name"}} 1.0' in text
    assert f"vllm:t_bytes_sum{{{labels}}} 5054.0" in text


def test_log_line(caplog: pytest.LogCaptureFixture):
    """A line for what was counted since the last, none where nothing was."""
    logger = LoggingStatLogger(config("CountingConnector"))
    for data in ({"bytes": [4, 50]}, None, {"bytes": [5000]}):
        logger.record(SchedulerStats(kv_connector_stats=data), None)
    with caplog.at_level("INFO"):
        logger.log()
        assert "KV transfer: transfers: 3, bytes: 5054" in caplog.text
        caplog.clear()
        logger.log()
        assert "KV transfer" not in caplog.text


@pytest.mark.parametrize("name", [None, "SilentConnector"])
def test_nothing_is_counted(name):
    """No connector, or one that counts nothing: nothing fails, nothing is shown."""
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(config(name), registry=registry)
    metrics.record_scheduler(SchedulerStats(kv_connector_stats={"bytes": [1]}))
    logging = KVConnectorLogging(config(name))
    logging.observe({"bytes": [1]})
    assert logging.take_line() is None
    assert "vllm:t_" not in generate_latest(registry).decode()

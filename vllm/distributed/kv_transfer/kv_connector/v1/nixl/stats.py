# SPDX-License-Identifier: Apache-2.0
"""What is counted of transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LISTS = ("transfer_duration", "bytes_transferred", "num_descriptors")
_COUNTS = ("num_failed_transfers", "num_failed_handshakes", "num_kv_expired_reqs")


@dataclass
class NixlKVConnectorStats(KVConnectorStats):
    """Of each request that was read: seconds from its first read to its last byte, bytes,
    descriptors. And how many requests failed in a transfer or a handshake, and how many leases ran
    out."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {name: [] for name in _LISTS} | dict.fromkeys(_COUNTS, 0)

    def record_transfer(self, seconds: float, nbytes: int, num_descriptors: int) -> None:
        """A request was read."""
        for name, value in zip(_LISTS, (seconds, nbytes, num_descriptors)):
            self.data[name].append(value)

    def record_failure(self, is_handshake: bool) -> None:
        """A request could not be read."""
        self.data["num_failed_handshakes" if is_handshake else "num_failed_transfers"] += 1

    def record_expired(self, count: int) -> None:
        """Leases ran out before the pages were read."""
        self.data["num_kv_expired_reqs"] += count

    def take(self) -> NixlKVConnectorStats:
        """What was counted so far; starts over."""
        taken = NixlKVConnectorStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> NixlKVConnectorStats:
        for name in (*_LISTS, *_COUNTS):
            self.data[name] += other.data[name]
        return self

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in (*_LISTS, *_COUNTS))

    def reduce(self) -> dict[str, int | float]:
        seconds, nbytes = sum(self.data["transfer_duration"]), sum(self.data["bytes_transferred"])
        return {
            "Num successful transfers": len(self.data["bytes_transferred"]),
            "Total MB": round(nbytes / 1e6, 3),
            "Throughput (MB/s)": round(nbytes / 1e6 / seconds, 3) if seconds else 0.0,
            "Num failed": sum(self.data[name] for name in _COUNTS[:2]),
            "Num expired": self.data["num_kv_expired_reqs"],
        }


class NixlPromMetrics(KVConnectorPromMetrics):
    """`vllm:nixl_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histograms = {
            "transfer_duration": (
                "vllm:nixl_xfer_time_seconds",
                "Seconds from the first read of a request's pages to the last byte.",
                [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30],
            ),
            "bytes_transferred": (
                "vllm:nixl_bytes_transferred",
                "Bytes read for a request.",
                [1 << shift for shift in range(12, 36, 2)],
            ),
            "num_descriptors": (
                "vllm:nixl_num_descriptors",
                "Runs of bytes read for a request.",
                [10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000],
            ),
        }
        counters = {
            "num_failed_transfers": (
                "vllm:nixl_num_failed_transfers",
                "Requests whose pages could not be read.",
            ),
            "num_failed_handshakes": (
                "vllm:nixl_num_failed_handshakes",
                "Requests whose peer could not be reached or does not fit.",
            ),
            "num_kv_expired_reqs": (
                "vllm:nixl_num_kv_expired_reqs",
                "Requests whose pages were freed before a peer had read them.",
            ),
        }
        self._histograms = {
            key: self.make_per_engine(
                self._histogram_cls(name=name, documentation=text, buckets=b, labelnames=labelnames)
            )
            for key, (name, text, b) in histograms.items()
        }
        self._counters = {
            key: self.make_per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            )
            for key, (name, text) in counters.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data[key]:
                histogram[engine_idx].observe(value)
        for key, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data[key])

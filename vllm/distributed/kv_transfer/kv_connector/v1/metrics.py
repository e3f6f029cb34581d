# SPDX-License-Identifier: Apache-2.0
"""What a connector counts: gathered in the worker, sent to the front, shown by Prometheus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PromMetric: TypeAlias = Gauge | Counter | Histogram
PromMetricT = TypeVar("PromMetricT", bound=PromMetric)


@dataclass
class KVConnectorStats(ABC):
    """Counts since they were last handed over. `data` holds plain numbers, strings, lists and dicts
    only: it travels to another process, where `build_kv_connector_stats(data)` makes this again."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Starts over."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the counts of `other`; returns this."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """A few numbers for a line in the log."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing was counted."""


class KVConnectorPromMetrics(ABC):
    """A connector's Prometheus metrics.

    Args:
        metric_types: Gauge, Counter and Histogram -> what to make one with in their place: called
            with `name`, `documentation`, `labelnames` and, for histograms, `buckets`.
        labelnames: labels that every metric has.
        per_engine_labelvalues: engine index -> values of those labels.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._vllm_config = vllm_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    def make_per_engine(self, metric: PromMetric) -> dict[int, PromMetric]:
        """`metric` with the labels of each engine, by the engine's index."""
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes in the `data` of an engine's stats."""

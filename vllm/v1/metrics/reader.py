# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of this process as plain values, for `LLM.get_metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.samples import Sample

from vllm.v1.metrics.prometheus import PREFIX


@dataclass
class Metric:
    """One time series."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations; `buckets` counts those up to each bound (which is the key, as Prometheus
    writes it)."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot() -> list[Metric]:
    """All `vllm:` metrics as they are now."""
    found: list[Metric] = []
    for metric in REGISTRY.collect():
        if metric.name.startswith(PREFIX):
            found.extend(_convert(metric))
    return found


def _convert(metric: PrometheusMetric) -> Iterable[Metric]:
    if metric.type == "gauge":
        for sample in metric.samples:
            yield Gauge(metric.name, sample.labels, sample.value)
    elif metric.type == "counter":
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield Counter(metric.name, sample.labels, int(sample.value))
    elif metric.type == "histogram":
        yield from _histograms(metric)


def _histograms(metric: PrometheusMetric) -> Iterable[Histogram]:
    by_labels: dict[tuple, list[Sample]] = {}
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        by_labels.setdefault(tuple(labels.items()), []).append(sample)
    for labels, samples in by_labels.items():
        buckets = {s.labels["le"]: int(s.value) for s in samples if s.name.endswith("_bucket")}
        plain = (s for s in samples if "le" not in s.labels)
        values = {s.name.removeprefix(metric.name): s.value for s in plain}
        yield Histogram(
            metric.name, dict(labels), int(values["_count"]), values["_sum"], buckets
        )

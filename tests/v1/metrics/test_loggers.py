# SPDX-License-Identifier: Apache-2.0
"""Statistics reach the log and Prometheus, each thing counted once."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.config import CacheConfig
from vllm.v1.metrics.loggers import (
    LoggingStatLogger,
    StatLoggerBase,
    StatLoggerManager,
    load_stat_logger_plugin_factories,
)
from vllm.v1.metrics.prometheus import PrometheusMetrics, buckets_1_2_5
from vllm.v1.metrics.stats import (
    EncoderStats,
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
)

# What the loggers read of a VllmConfig.
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name=["name", "alias"], max_model_len=2048),
    cache_config=CacheConfig(block_size=16),
    kv_transfer_config=None,
)


def scheduler_stats(running=0, waiting=0, usage=0.0, queries=0, hits=0, preempted=0):
    return SchedulerStats(running, waiting, usage, PrefixCacheStats(1, queries, hits), preempted)


def test_prometheus_text():
    """Names, labels and values as dashboards made for upstream expect them."""
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(CONFIG, registry=registry)
    metrics.set_cache_config_info()
    metrics.record_scheduler(scheduler_stats(3, 2, 0.25, 100, 40, preempted=1))
    metrics.record_scheduler(scheduler_stats(1, 0, 0.5, 10, 2))
    metrics.record_scheduler(SchedulerStats(1, 0, 0.5, encoder_stats=EncoderStats(2, 3)))
    finished = FinishedRequestStats("stop", 2.0, 7, 3, 16, 0.1, 0.2, 0.5, 0.4)
    metrics.record_iteration(
        IterationStats(
            num_generation_tokens=5, num_prompt_tokens=7, finished_requests=[finished],
            time_to_first_tokens_iter=[0.3], inter_token_latencies_iter=[0.2, 0.2],
        )  # fmt: skip
    )
    text = generate_latest(registry).decode()
    labels = 'engine="0",model_name="name"'
    for name, value in {
        f"vllm:num_requests_running{{{labels}}}": 1,
        f"vllm:num_requests_waiting{{{labels}}}": 0,
        f"vllm:kv_cache_usage_perc{{{labels}}}": 0.5,
        f"vllm:prefix_cache_queries_total{{{labels}}}": 110,
        f"vllm:encoder_passes_total{{{labels}}}": 2,
        f"vllm:encoder_hits_total{{{labels}}}": 3,
        f"vllm:prefix_cache_hits_total{{{labels}}}": 42,
        f"vllm:num_preemptions_total{{{labels}}}": 1,
        f"vllm:prompt_tokens_total{{{labels}}}": 7,
        f"vllm:generation_tokens_total{{{labels}}}": 5,
        f"vllm:time_to_first_token_seconds_count{{{labels}}}": 1,
        f"vllm:inter_token_latency_seconds_sum{{{labels}}}": 0.4,
        f"vllm:request_time_per_output_token_seconds_sum{{{labels}}}": 0.2,
        f"vllm:e2e_request_latency_seconds_sum{{{labels}}}": 2,
        f"vllm:request_queue_time_seconds_sum{{{labels}}}": 0.1,
        f"vllm:request_prefill_time_seconds_sum{{{labels}}}": 0.2,
        f"vllm:request_inference_time_seconds_sum{{{labels}}}": 0.5,
        f"vllm:request_decode_time_seconds_sum{{{labels}}}": 0.4,
        f"vllm:request_prompt_tokens_sum{{{labels}}}": 7,
        f"vllm:request_generation_tokens_sum{{{labels}}}": 3,
        f"vllm:request_params_max_tokens_sum{{{labels}}}": 16,
        f"vllm:iteration_tokens_total_sum{{{labels}}}": 12,
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="name"}': 1,
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="name"}': 0,
    }.items():
        assert f"\n{name} {float(value)}\n" in text, name
    assert 'vllm:cache_config_info{' in text and 'block_size="16"' in text


def test_second_engine_takes_the_place_of_the_first():
    """Making an engine again in one process (a notebook) must not fail on names in use."""
    registry = CollectorRegistry()
    PrometheusMetrics(CONFIG, registry=registry).record_scheduler(scheduler_stats(3))
    PrometheusMetrics(CONFIG, registry=registry)
    text = generate_latest(registry).decode()
    assert 'vllm:num_requests_running{engine="0",model_name="name"} 0.0' in text


def test_buckets():
    """The longest request is in a bucket of its own."""
    assert buckets_1_2_5(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert buckets_1_2_5(1) == [1]


def test_log_line_only_with_traffic(caplog_vllm):
    """Nobody wants a line every ten seconds from an idle server; traffic's end is shown once."""
    logger = LoggingStatLogger(CONFIG)
    logger.log()
    assert not caplog_vllm.records
    logger.record(
        scheduler_stats(2, 1, 0.125, 100, 50),
        IterationStats(num_generation_tokens=10, num_prompt_tokens=20),
    )
    logger.log()
    (line,) = (r.getMessage() for r in caplog_vllm.records)
    for part in ("Running: 2 reqs", "Waiting: 1 reqs", "usage: 12.5%", "hit rate: 50.0%"):
        assert part in line
    assert "prompt throughput: 0.0" not in line
    caplog_vllm.clear()
    logger.record(scheduler_stats(), None)
    logger.log()
    logger.log()
    (line,) = (r.getMessage() for r in caplog_vllm.records)
    assert "Running: 0 reqs" in line and "generation throughput: 0.0" in line


class Recorder(StatLoggerBase):
    """Stands for a plugin's logger."""

    def __init__(self, vllm_config, engine_index=0):
        self.seen = []

    def record(self, scheduler_stats, iteration_stats, engine_idx=0):
        self.seen.append((scheduler_stats, iteration_stats))


class Faulty(Recorder):
    def record(self, scheduler_stats, iteration_stats, engine_idx=0):
        raise RuntimeError("a fault of the plugin's")


def plugins(monkeypatch, *classes):
    """Lets `classes` be found as installed stat logger plugins."""
    found = [
        importlib.metadata.EntryPoint(one.__name__, f"{one.__module__}:{one.__qualname__}", "g")
        for one in classes
    ]
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: globals()[self.name])

    def entry_points(group):
        return found if group == "vllm.stat_logger_plugins" else []

    monkeypatch.setattr("vllm.plugins.entry_points", entry_points)


def test_plugin_loggers(monkeypatch, caplog_vllm):
    """A plugin's logger gets everything; one that fails is named and costs the others nothing."""
    plugins(monkeypatch, Faulty, Recorder)
    manager = StatLoggerManager(CONFIG, enable_default_loggers=False)
    stats = scheduler_stats(1)
    manager.record(stats, None)
    manager.record(stats, None)
    (recorder,) = manager.stat_loggers
    assert recorder.seen == [(stats, None)] * 2
    assert [r for r in caplog_vllm.records if "Faulty" in r.getMessage()]


def test_plugin_of_another_kind_is_refused(monkeypatch):
    """A function where a class is needed: say so at the start, by name."""
    plugins(monkeypatch, plugins)
    with pytest.raises(TypeError, match="'plugins' must be a subclass"):
        load_stat_logger_plugin_factories()

# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics, under upstream's names and with the labels `model_name` and `engine`."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

from vllm.config import VllmConfig
from vllm.v1.engine import FINISH_REASON_STRINGS
from vllm.v1.metrics.kv_connector import KVConnectorMetrics
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

PREFIX = "vllm:"
_LABELS = ("model_name", "engine")

_GAUGES = {
    "num_requests_running": "Requests in the batch that the model runs.",
    "num_requests_waiting": "Requests that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the KV cache that requests hold; 1 is all of it.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "encoder_passes": "Encoder inputs that the encoder ran over.",
    "encoder_hits": "Encoder inputs whose keys and values were in the KV cache already.",
    "num_preemptions": "Times that a request was preempted.",
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens that were not computed, but in the prefix cache.",
    "generation_tokens": "Tokens generated.",
}
_FIRST_TOKEN_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]  # fmt: skip
_BETWEEN_TOKENS_S = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
]  # fmt: skip
_REQUEST_S = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
]  # fmt: skip
_ITERATION_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
_SECONDS_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between two tokens.", _BETWEEN_TOKENS_S),
    "request_time_per_output_token_seconds": (
        "A request's mean time per token after the first.", _BETWEEN_TOKENS_S,
    ),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _REQUEST_S),
    "request_queue_time_seconds": ("Time that a request waited.", _REQUEST_S),
    "request_inference_time_seconds": ("Time from its start to its last token.", _REQUEST_S),
    "request_prefill_time_seconds": ("Time from its start to its first token.", _REQUEST_S),
    "request_decode_time_seconds": ("Time from its first to its last token.", _REQUEST_S),
}  # fmt: skip
_N_PARAMS = [1, 2, 5, 10, 20]
_TOKENS_HISTOGRAMS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_max_num_generation_tokens": "Tokens of the longest completion of a request.",
}


def buckets_1_2_5(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    steps = (m * 10**e for e in range(len(str(max_value))) for m in (1, 2, 5))
    return [step for step in steps if step <= max_value] or [1]


def unregister_vllm_metrics(registry: CollectorRegistry = REGISTRY) -> None:
    """Takes our metrics out of the registry: of two engines in a process, the later one's count."""
    for collector in list(registry._collector_to_names):
        if any(name.startswith(PREFIX) for name in registry._collector_to_names[collector]):
            registry.unregister(collector)


class PrometheusMetrics:
    """The metrics of one engine. Every time series exists from the start, at zero."""

    def __init__(
        self, vllm_config: VllmConfig, engine_index: int = 0, registry: CollectorRegistry = REGISTRY
    ) -> None:
        unregister_vllm_metrics(registry)
        self._registry = registry
        self._cache_config = vllm_config.cache_config
        served = vllm_config.model_config.served_model_name
        self._labels = (served[0] if isinstance(served, list) else served, str(engine_index))
        self.gauges = {n: self._one(Gauge, n, text) for n, text in _GAUGES.items()}
        self.counters = {n: self._one(Counter, n, text) for n, text in _COUNTERS.items()}
        lengths = buckets_1_2_5(vllm_config.model_config.max_model_len)
        self.histograms = {
            **{n: self._one(Histogram, n, text, buckets=buckets)
               for n, (text, buckets) in _SECONDS_HISTOGRAMS.items()},
            **{n: self._one(Histogram, n, text, buckets=lengths)
               for n, text in _TOKENS_HISTOGRAMS.items()},
            "request_params_n": self._one(
                Histogram, "request_params_n", "Completions (n) of a request.", buckets=_N_PARAMS
            ),
            "iteration_tokens_total": self._one(
                Histogram, "iteration_tokens_total", "Tokens in a step.", buckets=_ITERATION_TOKENS
            ),
        }  # fmt: skip
        self.request_success = self._request_success()
        self._kv_connector = KVConnectorMetrics(vllm_config, _LABELS, self._labels, registry)

    def _one(self, kind: type, name: str, text: str, **options: Any) -> Any:
        made = kind(PREFIX + name, text, _LABELS, registry=self._registry, **options)
        return made.labels(*self._labels)

    def _request_success(self) -> dict[str, Counter]:
        text = "Requests that have ended, by reason."
        names = (*_LABELS, "finished_reason")
        made = Counter(f"{PREFIX}request_success", text, names, registry=self._registry)
        return {reason: made.labels(*self._labels, reason) for reason in FINISH_REASON_STRINGS}

    def set_cache_config_info(self) -> None:
        """The cache's config as labels of a metric that is always 1."""
        info = {**self._cache_config.metrics_info(), "engine": self._labels[1]}
        name = f"{PREFIX}cache_config_info"
        gauge = Gauge(name, "The KV cache's config.", list(info), registry=self._registry)
        gauge.labels(**info).set(1)

    def record_scheduler(self, stats: SchedulerStats) -> None:
        """Takes in what the scheduler says after a step."""
        self.gauges["num_requests_running"].set(stats.num_running_reqs)
        self.gauges["num_requests_waiting"].set(stats.num_waiting_reqs)
        self.gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        self.counters["prefix_cache_queries"].inc(stats.prefix_cache_stats.queries)
        self.counters["prefix_cache_hits"].inc(stats.prefix_cache_stats.hits)
        self.counters["encoder_passes"].inc(stats.encoder_stats.num_encoded)
        self.counters["encoder_hits"].inc(stats.encoder_stats.num_found)
        self.counters["num_preemptions"].inc(stats.num_preempted_reqs)
        self._kv_connector.observe(stats.kv_connector_stats)

    def record_iteration(self, stats: IterationStats) -> None:
        """Takes in what a step brought."""
        self.counters["prompt_tokens"].inc(stats.num_prompt_tokens)
        self.counters["prompt_tokens_cached"].inc(stats.num_cached_tokens)
        self.counters["generation_tokens"].inc(stats.num_generation_tokens)
        num_tokens = stats.num_prompt_tokens + stats.num_generation_tokens
        if num_tokens:
            self.histograms["iteration_tokens_total"].observe(num_tokens)
        for seconds in stats.time_to_first_tokens_iter:
            self.histograms["time_to_first_token_seconds"].observe(seconds)
        for seconds in stats.inter_token_latencies_iter:
            self.histograms["inter_token_latency_seconds"].observe(seconds)
        for n in stats.n_params_iter:
            self.histograms["request_params_n"].observe(n)
        for num_tokens in stats.max_num_generation_tokens_iter:
            self.histograms["request_max_num_generation_tokens"].observe(num_tokens)
        for request in stats.finished_requests:
            self._record_finished(request)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.request_success[request.finish_reason].inc()
        num_later = request.num_generation_tokens - 1
        values = {
            "e2e_request_latency_seconds": request.e2e_latency,
            "request_queue_time_seconds": request.queued_time,
            "request_inference_time_seconds": request.inference_time,
            "request_prefill_time_seconds": request.prefill_time,
            "request_decode_time_seconds": request.decode_time,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": request.num_generation_tokens,
        }
        if request.max_tokens_param is not None:
            values["request_params_max_tokens"] = request.max_tokens_param
        if num_later > 0:
            values["request_time_per_output_token_seconds"] = request.decode_time / num_later
        for name, value in values.items():
            self.histograms[name].observe(value)

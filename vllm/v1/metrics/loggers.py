# SPDX-License-Identifier: Apache-2.0
"""Where statistics go: a line in the log, Prometheus, and loggers that plugins bring."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP, load_plugins_by_group
from vllm.v1.metrics.kv_connector import KVConnectorLogging
from vllm.v1.metrics.prometheus import PrometheusMetrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

logger = init_logger(__name__)

StatLoggerFactory = Callable[[VllmConfig, int], "StatLoggerBase"]
# The hit rate is that of the latest prompts: a whole run's would hide a change.
_HIT_RATE_TOKENS = 100_000


class StatLoggerBase(ABC):
    """Gets statistics after every step of the engine. A plugin of group `vllm.stat_logger_plugins`
    is a subclass."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        """Takes in what one message of the engine core brought; either may be missing."""

    def log_engine_initialized(self) -> None:
        """Called once, when the engine is ready."""

    def log(self) -> None:
        """Called every VLLM_LOG_STATS_INTERVAL seconds."""


def load_stat_logger_plugin_factories() -> list[StatLoggerFactory]:
    """The loggers that plugins bring.

    Raises:
        TypeError: a plugin is no subclass of `StatLoggerBase`.
    """
    factories: list[StatLoggerFactory] = []
    for name, plugin in load_plugins_by_group(STAT_LOGGER_PLUGINS_GROUP).items():
        if not (isinstance(plugin, type) and issubclass(plugin, StatLoggerBase)):
            raise TypeError(
                f"stat logger plugin {name!r} must be a subclass of StatLoggerBase, not {plugin!r}"
            )
        factories.append(plugin)
    return factories


class _HitRate:
    """Share of looked-up prompt tokens that were in the prefix cache, over the latest of them."""

    def __init__(self) -> None:
        self._queries = self._hits = 0.0

    def add(self, queries: int, hits: int, reset: bool) -> None:
        if reset:
            self._queries = self._hits = 0.0
        self._queries += queries
        self._hits += hits
        if self._queries > _HIT_RATE_TOKENS:
            # Older ones count less and less.
            scale = _HIT_RATE_TOKENS / self._queries
            self._queries *= scale
            self._hits *= scale

    @property
    def percent(self) -> float:
        return 100.0 * self._hits / self._queries if self._queries else 0.0


class LoggingStatLogger(StatLoggerBase):
    """A line in the log, as long as there is traffic and once when it ends."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self._latest = SchedulerStats()
        self._hit_rate = _HitRate()
        self._kv_connector = KVConnectorLogging(vllm_config)
        self._was_idle = True
        self._start_interval()

    def _start_interval(self) -> None:
        self._since = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preempted = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.num_prompt_tokens
            self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._latest = scheduler_stats
            self._num_preempted += scheduler_stats.num_preempted_reqs
            prefix = scheduler_stats.prefix_cache_stats
            self._hit_rate.add(prefix.queries, prefix.hits, prefix.reset)
            self._kv_connector.observe(scheduler_stats.kv_connector_stats)

    def log(self) -> None:
        stats, elapsed_s = self._latest, max(time.monotonic() - self._since, 1e-9)
        num_tokens = self._num_prompt_tokens + self._num_generation_tokens
        is_idle = not (num_tokens or stats.num_running_reqs or stats.num_waiting_reqs)
        if not (is_idle and self._was_idle):
            preempted = f"Preempted: {self._num_preempted} reqs, " if self._num_preempted else ""
            logger.info(
                "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: "
                "%.1f tokens/s, Running: %d reqs, Waiting: %d reqs, %sKV cache usage: %.1f%%, "
                "Prefix cache hit rate: %.1f%%",
                self.engine_index,
                self._num_prompt_tokens / elapsed_s,
                self._num_generation_tokens / elapsed_s,
                stats.num_running_reqs,
                stats.num_waiting_reqs,
                preempted,
                stats.kv_cache_usage * 100,
                self._hit_rate.percent,
            )
        transfers = self._kv_connector.take_line()
        if transfers is not None:
            logger.info("Engine %03d: KV transfer: %s", self.engine_index, transfers)
        self._was_idle = is_idle
        self._start_interval()


class PrometheusStatLogger(StatLoggerBase):
    """Prometheus metrics under upstream's names; see `vllm.v1.metrics.prometheus`."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.metrics = PrometheusMetrics(vllm_config, engine_index)

    def log_engine_initialized(self) -> None:
        self.metrics.set_cache_config_info()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.metrics.record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self.metrics.record_iteration(iteration_stats)


class StatLoggerManager:
    """All loggers of one engine. One that fails is left out from then on: statistics must not stop
    requests."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        custom_stat_loggers: list[StatLoggerFactory] | None = None,
        enable_default_loggers: bool = True,
    ) -> None:
        factories = [*(custom_stat_loggers or []), *load_stat_logger_plugin_factories()]
        if enable_default_loggers:
            factories += [LoggingStatLogger, PrometheusStatLogger]
        self.stat_loggers = [factory(vllm_config, 0) for factory in factories]

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Hands statistics to every logger."""
        self._each(lambda one: one.record(scheduler_stats, iteration_stats, 0))

    def log(self) -> None:
        """Lets every logger write what it has."""
        self._each(lambda one: one.log())

    def log_engine_initialized(self) -> None:
        """Tells every logger that the engine is ready."""
        self._each(lambda one: one.log_engine_initialized())

    def _each(self, call: Callable[[StatLoggerBase], None]) -> None:
        for one in list(self.stat_loggers):
            try:
                call(one)
            except Exception:
                logger.exception("%s failed and gets no more statistics", type(one).__name__)
                self.stat_loggers.remove(one)

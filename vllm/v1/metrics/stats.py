# SPDX-License-Identifier: Apache-2.0
"""What is counted, where it happens: the engine core's stats travel to the front, which adds its
own; `vllm.v1.metrics.loggers` shows both."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec


class PrefixCacheStats(msgspec.Struct):
    """Prefix cache look-ups since the last report: `queries` and `hits` in tokens, `reset` whether
    the cache was emptied."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    reset: bool = False

    def record(self, num_tokens: int, num_hits: int) -> None:
        """Adds one request's look-up."""
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits


class PrefillStats(msgspec.Struct):
    """How a request's prompt was computed, told with its first output."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class SchedulerStats(msgspec.Struct):
    """The scheduler after a step. `kv_cache_usage` is a share of 1."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    num_preempted_reqs: int = 0


@dataclass
class RequestStateStats:
    """One request's times. `arrival_time` is wall-clock; the other times are the engine core's
    monotonic clock, so only their differences mean something."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class FinishedRequestStats:
    """A request that ended, in seconds and tokens."""

    finish_reason: str
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0


@dataclass
class IterationStats:
    """What one batch of engine core outputs brought to the front."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)

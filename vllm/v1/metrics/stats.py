# SPDX-License-Identifier: Apache-2.0
"""What is counted, where it happens: the engine core's stats travel to the front, which adds its
own; `vllm.v1.metrics.loggers` shows both."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput


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


class EncoderStats(msgspec.Struct):
    """Encoder inputs of admitted requests since the last report: those that the encoder ran over,
    and those whose keys and values were in the KV cache already."""

    num_encoded: int = 0
    num_found: int = 0


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
    encoder_stats: EncoderStats = msgspec.field(default_factory=EncoderStats)
    # What a KV connector has counted; `build_kv_connector_stats` of its class reads it.
    kv_connector_stats: dict[str, Any] | None = None


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
    # Of requests whose last completion has ended: how many there were, and the longest's tokens.
    n_params_iter: list[int] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)

    def update_from_output(
        self, output: EngineCoreOutput, engine_core_timestamp: float, request: RequestStateStats
    ) -> None:
        """Takes in one output of the request that `request` describes, and updates that."""
        if output.events:
            self.update_from_events(output.events, request)
        if output.prefill_stats is not None:
            self.num_prompt_tokens += output.prefill_stats.num_prompt_tokens
            self.num_cached_tokens += output.prefill_stats.num_cached_tokens
        num_new = len(output.new_token_ids)
        if num_new == 0:
            return
        self.num_generation_tokens += num_new
        if request.num_generation_tokens == 0:
            request.first_token_ts = engine_core_timestamp
            request.first_token_latency = self.iteration_timestamp - request.arrival_time
            self.time_to_first_tokens_iter.append(request.first_token_latency)
        else:
            self.inter_token_latencies_iter.append(engine_core_timestamp - request.last_token_ts)
        request.last_token_ts = engine_core_timestamp
        request.num_generation_tokens += num_new

    def update_from_events(
        self, events: Iterable[EngineCoreEvent], request: RequestStateStats
    ) -> None:
        """Takes in what happened to a request in the engine core."""
        from vllm.v1.engine import EngineCoreEventType

        for event in events:
            if event.type == EngineCoreEventType.QUEUED:
                request.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                # After a preemption it is scheduled again; its wait was over the first time.
                request.scheduled_ts = request.scheduled_ts or event.timestamp
            else:
                self.num_preempted_reqs += 1

    def update_from_finished_request(
        self,
        finish_reason: str,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        request: RequestStateStats,
    ) -> None:
        """Adds a request that has ended. Times of what it never reached are 0."""

        def between(begin: float, end: float) -> float:
            return end - begin if begin and end else 0.0

        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                e2e_latency=self.iteration_timestamp - request.arrival_time,
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=request.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=between(request.queued_ts, request.scheduled_ts),
                prefill_time=between(request.scheduled_ts, request.first_token_ts),
                inference_time=between(request.scheduled_ts, request.last_token_ts),
                decode_time=between(request.first_token_ts, request.last_token_ts),
            )
        )

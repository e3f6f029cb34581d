# SPDX-License-Identifier: Apache-2.0
"""A request inside the engine core: what was asked, how far it has come, how it ended."""

from __future__ import annotations

import copy
import enum
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_block import BlockHash

_order_of_arrival = itertools.count()
# A power of 2, so that places between two requests' are exact.
MAX_FORKS = 1024


class Adapter(Protocol):
    """A LoRA adapter (`LoRARequest`), by a number of its own."""

    lora_int_id: int


class Request:
    """One request, from its arrival at the scheduler until its last output.

    Set here: everything about the prompt. Set by the scheduler: `status`, `num_computed_tokens`
    (tokens whose keys and values are in the cache or on their way), `num_cached_tokens` (of those,
    found in the prefix cache; -1 until first scheduled), `num_preemptions`, `num_overtaken`.

    `sequence` is this request's place in the order of arrival: unlike the client's
    `arrival_time`, it is unique and follows no clock.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: None = None,
        client_index: int = 0,
        arrival_time: float | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        lora_request: Adapter | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
    ) -> None:
        if pooling_params is not None or sampling_params is None:
            raise ValueError(f"request {request_id}: only generation is supported, not pooling")
        if not prompt_token_ids:
            raise ValueError(f"request {request_id} has no prompt tokens")
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.sequence = next(_order_of_arrival)
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.sampling_params = sampling_params
        max_tokens = sampling_params.max_tokens
        self.max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self.mm_features = mm_features or []
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.trace_headers = trace_headers
        self.kv_transfer_params = sampling_params.kv_transfer_params

        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self._output_token_ids: list[int] = []
        self._all_token_ids: list[int] = prompt_token_ids.copy()

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error_message: str | None = None
        self.is_engine_fault = False
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_overtaken = 0
        self._events: list[EngineCoreEvent] = []
        self._prefill_stats_taken = False

        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self.update_block_hashes()

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, block_hasher: Callable[[Request], list[BlockHash]] | None
    ) -> Request:
        """The request that came over the wire."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            mm_features=request.mm_features,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
        )

    def fork(self, request_id: str, output_token_ids: list[int], number: int) -> Request:
        """A request of this one's prompt that goes on after `output_token_ids`, for one token. It
        has this one's place in the order of arrival, those of one number after another.

        This request must not have been scheduled; `number` is less than `MAX_FORKS`.
        """
        fork = copy.copy(self)
        fork.request_id = request_id
        fork.sequence = self.sequence + number / MAX_FORKS
        fork.max_tokens = len(output_token_ids) + 1
        fork._output_token_ids = list(output_token_ids)
        fork._all_token_ids = self.prompt_token_ids + output_token_ids
        fork._events = []
        fork.block_hashes = list(self.block_hashes)
        fork.update_block_hashes()
        return fork

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Adds sampled tokens and the hashes of the blocks they fill."""
        new = [token_ids] if isinstance(token_ids, int) else token_ids
        self._output_token_ids.extend(new)
        self._all_token_ids.extend(new)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hashes the blocks that have become full."""
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Tokens sampled so far; to be read only."""
        return self._output_token_ids

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output; to be read only."""
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self._output_token_ids)

    @property
    def num_encoder_inputs(self) -> int:
        """Inputs of the encoder."""
        return len(self.mm_features)

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether it has inputs of the encoder."""
        return bool(self.mm_features)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Embeddings that the encoder makes of input `input_id`."""
        return self.mm_features[input_id].mm_position.get_num_embeds()

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether its prompt must be computed whole, though parts may be cached: it asks for
        something about each prompt token, or says so itself."""
        wish = self.sampling_params.skip_reading_prefix_cache
        return self.sampling_params.prompt_logprobs is not None if wish is None else wish

    def is_finished(self) -> bool:
        """Whether it has ended, one way or another."""
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> FinishReason | None:
        """How it ended, as clients are told; None while it has not."""
        return RequestStatus.get_finished_reason(self.status)

    def record_event(
        self, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> None:
        """Notes that something happened to it, now unless `timestamp` says when."""
        self._events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The events noted since this was last called; None for none."""
        events, self._events = self._events, []
        return events or None

    def take_prefill_stats(self) -> PrefillStats | None:
        """How the prompt was computed: once, afterwards None."""
        if self._prefill_stats_taken:
            return None
        self._prefill_stats_taken = True
        return PrefillStats(self.num_prompt_tokens, max(self.num_cached_tokens, 0))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}, computed {self.num_computed_tokens})"
        )


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything after PREEMPTED is an end."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether `status` is an end."""
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        """How clients are told of that end; None if it is none."""
        return _FINISHED_REASONS.get(status)


_FINISHED_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}

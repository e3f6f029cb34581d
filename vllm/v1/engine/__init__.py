# SPDX-License-Identifier: Apache-2.0
"""What travels between the front (API server, `LLM`) and the engine core: msgpack over ZMQ.

`EngineCoreRequest` goes in, `EngineCoreOutputs` come out. Nothing here imports torch: arrays are
numpy, so that the API server's process need not load it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error")


class FinishReason(enum.IntEnum):
    """Why a request ended. STOP: an end-of-sequence token, stop token or stop string; LENGTH: its
    max_tokens or the model's length; ABORT: the client's wish; ERROR: it could not go on."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


class EngineCoreReadyResponse(msgspec.Struct):
    """What the engine core tells the front once it can take requests."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request as the engine core takes it; made by the input processor, which sets every field.

    `request_id` is unique in the engine; `external_req_id` is the client's own. Of an
    encoder-decoder model's request `prompt_token_ids` are the decoder's, and `mm_features` is the
    encoder's input.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    cache_salt: str | None = None
    client_index: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    external_req_id: str | None = None
    mm_features: list[MultiModalFeatureSpec] | None = None


class EngineCoreEventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    """Something that happened to a request; `timestamp` in seconds of the monotonic clock, to be
    compared with others of the same process only."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(
        cls, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> EngineCoreEvent:
        """An event of now, unless `timestamp` says otherwise."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step gave one request.

    `new_logprobs` has a row for each new token; `new_prompt_logprobs_tensors` a row for each prompt
    position after the first, once, when the prompt was computed.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: PrefillStats | None = None
    num_nans_in_logits: int = 0
    # Why the request ended with an error, in words for its user; and whether the engine is at fault
    # rather than the request, which asks for what cannot be.
    error_message: str | None = None
    is_engine_fault: bool = False
    # Of a sequence of a beam search.
    beam_score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The answer to a utility call: `result`, or `failure_message` if it raised."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step gave all requests of one client.

    `finished_requests` names requests that ended without an output of their own in it.
    `timestamp` is the engine core's monotonic clock.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class EngineCoreRequestType(enum.Enum):
    """First frame of a message to the engine core: one byte, so that it is read without decoding."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"

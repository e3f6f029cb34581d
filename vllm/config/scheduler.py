# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import InitVar, field
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vllm.config.utils import config, hash_factors

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import SchedulerInterface

RunnerType = Literal["generate"]
SchedulerPolicy = Literal["fcfs", "priority"]


@config
class SchedulerConfig:
    """What one step may hold, and whose turn it is."""

    max_model_len: InitVar[int]
    """The longest request, prompt and output; only checked against."""
    is_encoder_decoder: InitVar[bool]
    """Whether the model has an encoder."""

    DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048
    DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128

    runner_type: RunnerType = "generate"
    """What the model is run for."""
    max_num_batched_tokens: int = Field(default=DEFAULT_MAX_NUM_BATCHED_TOKENS, ge=1)
    """Tokens in one step, over all requests."""
    max_num_seqs: int = Field(default=DEFAULT_MAX_NUM_SEQS, ge=1)
    """Requests in one step."""
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """Prompt tokens of one request in one step; 0: as many as the step holds."""
    enable_chunked_prefill: bool = True
    """Let a prompt be computed over several steps."""
    max_num_encoder_input_tokens: int = field(init=False, default=0)
    """Encoder tokens in one step, over all requests; one longer input is encoded by itself. Set by
    the constructor: `max_num_batched_tokens`."""
    encoder_cache_size: int = field(init=False, default=0)
    """Tokens of encoder output that are kept at a time. Set by the constructor, likewise."""
    policy: SchedulerPolicy = "fcfs"
    """fcfs: in order of arrival; priority: lower values of a request's priority first."""
    scheduler_cls: str | type[object] | None = None
    """Another scheduler: a class or its dotted name."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Give layers with a sliding window pages for the whole request, as full attention has. Left
    out: only where the platform does not support pages of their own."""
    watermark: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the pages kept free when a request is admitted."""
    async_scheduling: bool | None = None
    """Schedule a step while the one before runs. Left out: off."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens between two messages of a stream (the first and the last are sent at once)."""

    @staticmethod
    def default_factory(**kwargs) -> SchedulerConfig:
        """A config for tests and plugins that have no model at hand."""
        kwargs.setdefault("max_model_len", 8192)
        kwargs.setdefault("is_encoder_decoder", False)
        return SchedulerConfig(**kwargs)

    def get_scheduler_cls(self) -> type[SchedulerInterface]:
        """The scheduler's class.

        Raises:
            ImportError: `scheduler_cls` names nothing importable.
        """
        if self.scheduler_cls is None:
            from vllm.v1.core.sched.scheduler import Scheduler

            return Scheduler
        if isinstance(self.scheduler_cls, str):
            from vllm.utils.import_utils import resolve_obj_by_qualname

            return resolve_obj_by_qualname(self.scheduler_cls)
        return self.scheduler_cls  # type: ignore[return-value]

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"max_num_batched_tokens": self.max_num_batched_tokens})

    def __post_init__(self, max_model_len: int, is_encoder_decoder: bool) -> None:
        self.verify_max_model_len(max_model_len)
        self.max_num_encoder_input_tokens = self.max_num_batched_tokens
        self.encoder_cache_size = self.max_num_batched_tokens
        if self.async_scheduling:
            raise ValueError("async_scheduling is not supported; leave it out")

    def verify_max_model_len(self, max_model_len: int) -> SchedulerConfig:
        """Checks the step's size against the longest request.

        Raises:
            ValueError: without chunked prefill a prompt could never run.
        """
        if self.max_num_batched_tokens < max_model_len and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than "
                f"max_model_len ({max_model_len}) and chunked prefill is off, so long prompts could "
                "never run: raise --max-num-batched-tokens or leave chunked prefill on"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request takes a token a step"
            )
        return self

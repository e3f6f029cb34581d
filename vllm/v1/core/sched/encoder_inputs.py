# SPDX-License-Identifier: Apache-2.0
"""Which encoder inputs a step runs the encoder over.

A request's inputs are encoded in the step that admits it, after a preemption too, unless their keys
and values are in the KV cache: left there by a request with the same inputs, or being written in
this very step by one that was admitted before it.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, compute_mm_encoder_budget
from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig
from vllm.v1.metrics.stats import EncoderStats
from vllm.v1.request import Request


class EncoderInputs:
    """The encoder's share in each step. Of models without an encoder no request has inputs."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._is_needed = vllm_config.model_config.is_encoder_decoder
        specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        limits = (s.max_num_encoder_tokens for s in specs if isinstance(s, CrossAttentionSpec))
        self._max_tokens_per_request = min((n for n in limits if n is not None), default=None)
        self.tokens_per_step, cache_size = compute_mm_encoder_budget(
            vllm_config.scheduler_config, {"all": self._max_tokens_per_request or 0}
        )
        self._cache = EncoderCacheManager.create_manager(
            cache_size=cache_size, vllm_config=vllm_config
        )
        self._stats = EncoderStats()

    def num_tokens(self, request: Request) -> int:
        """Tokens of encoder output that decoder layers look at."""
        if not self._is_needed:
            return 0
        return sum(map(request.get_num_encoder_embeds, range(request.num_encoder_inputs)))

    def why_never(self, request: Request) -> str | None:
        """Why the request's inputs can never be encoded, in words for its user."""
        if not self._is_needed:
            return "the model has no encoder for its inputs" if request.has_encoder_inputs else None
        num_tokens, most = self.num_tokens(request), self._max_tokens_per_request
        if num_tokens == 0:
            return "the request has no encoder input, which this model needs"
        if most is not None and num_tokens > most:
            return f"the encoder input has {num_tokens} tokens; the model's encoder takes {most}"
        return None

    def has_room(self, request: Request, plan: StepPlan) -> bool:
        """Whether the step can encode all inputs of the request beside those that it has; if it has
        none, always: or they might never get their turn."""
        if not plan.encoder_inputs:
            return True
        budget = self.tokens_per_step - plan.num_encoder_tokens
        num_before = 0
        for input_id in range(request.num_encoder_inputs):
            if not self._cache.can_allocate(request, input_id, budget, num_before):
                return False
            num_before += request.get_num_encoder_embeds(input_id)
        return True

    def encode(self, request: Request, plan: StepPlan) -> None:
        """The step encodes all inputs of the request."""
        if not request.has_encoder_inputs:
            return
        input_ids = list(range(request.num_encoder_inputs))
        for input_id in input_ids:
            self._cache.allocate(request, input_id)
        plan.add_encoder_inputs(request, input_ids, self.num_tokens(request))
        self._stats.num_encoded += len(input_ids)

    def found(self, request: Request) -> None:
        """The request was admitted, and its inputs' keys and values are in the KV cache."""
        # One that was preempted finds what it left itself: that is no hit.
        if request.num_preemptions == 0:
            self._stats.num_found += request.num_encoder_inputs

    def end_step(self) -> list[str]:
        """Identifiers of outputs that the runner is to forget before it encodes this step's."""
        return self._cache.get_freed_mm_hashes()

    def take_stats(self) -> EncoderStats:
        """What was counted since this was last called."""
        stats, self._stats = self._stats, EncoderStats()
        return stats

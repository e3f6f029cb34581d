# SPDX-License-Identifier: Apache-2.0
"""Why a request can never run, in words for its user."""

from __future__ import annotations

import bisect

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderInputs
from vllm.v1.request import Request


class Feasibility:
    """What the model's length, a step and the pool can hold of one request."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_manager: KVCacheManager,
        encoder_inputs: EncoderInputs,
    ) -> None:
        self._max_model_len = vllm_config.model_config.max_model_len
        self._config = vllm_config.scheduler_config
        self._manager = kv_cache_manager
        self._encoder_inputs = encoder_inputs

    def why_never(self, request: Request) -> str | None:
        """None if it can run, sooner or later."""
        num_tokens = request.num_tokens
        if num_tokens > self._max_model_len:
            return f"the prompt has {num_tokens} tokens; max_model_len is {self._max_model_len}"
        tokens_per_step = self._config.max_num_batched_tokens
        if not self._config.enable_chunked_prefill and num_tokens > tokens_per_step:
            return (
                f"the prompt has {num_tokens} tokens, a step {tokens_per_step} "
                "(--max-num-batched-tokens), and prompts are not split (chunked prefill is off)"
            )
        num_encoder_tokens = self._encoder_inputs.num_tokens(request)
        if not self._manager.can_ever_hold(num_tokens, num_encoder_tokens):
            return self.too_large_for_the_pool(request)
        return self._encoder_inputs.why_never(request)

    def too_large_for_the_pool(self, request: Request) -> str:
        """Says how large a request may be."""
        manager = self._manager
        num_encoder_tokens = self._encoder_inputs.num_tokens(request)
        longest = bisect.bisect_left(
            range(1, self._max_model_len + 1),
            True,
            key=lambda num_tokens: not manager.can_ever_hold(num_tokens, num_encoder_tokens),
        )
        block_sizes = sorted({m.block_size for m in manager.single_type_managers})
        beside = f" beside {num_encoder_tokens} of encoder input" if num_encoder_tokens else ""
        return (
            f"the request has {request.num_tokens} tokens ({request.num_prompt_tokens} of prompt, "
            f"{request.num_output_tokens} generated), but the KV cache "
            f"({manager.block_pool.num_usable_blocks} pages of {'/'.join(map(str, block_sizes))} "
            f"tokens) holds at most {longest} of one request{beside}: ask for fewer, or start "
            "the server with a larger KV cache (--num-gpu-blocks-override, --kv-cache-memory-bytes)"
        )

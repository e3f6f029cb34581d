# SPDX-License-Identifier: Apache-2.0
"""An executor without a model, for tests of the engine around it: a request's output repeats its
prompt, so that requests which get mixed up are seen.

Options come through `VllmConfig.additional_config`: `step_seconds` makes a step slow, a prompt that
holds `poison` makes it fail.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

POISON = 13


class EchoExecutor(Executor):
    """Keeps of each request its tokens, as a runner does."""

    def _init_executor(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.num_known: dict[str, int] = {}
        if self.vllm_config.additional_config.get("fail_at_start"):
            raise RuntimeError("told to fail")

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec]]:
        block_size = self.vllm_config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32"
        )
        return [{"layers.0": spec}]

    def determine_available_memory(self) -> list[int]:
        return [self.vllm_config.additional_config.get("kv_bytes", 64 << 20)]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.kv_cache_configs = kv_cache_configs

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> list[Any]:
        if callable(method):
            return [method(self, *args, **(kwargs or {}))]
        return [getattr(self, method)(*args, **(kwargs or {}))]

    def _call_worker(self, rank: int, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def get_pid(self) -> int:
        return os.getpid()

    def get_function(self) -> Any:
        return lambda: None

    def num_known_requests(self) -> int:
        return len(self.prompts)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.vllm_config.additional_config.get("step_seconds", 0))
        self._forget(scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids)
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            if POISON in new.prompt_token_ids:
                raise RuntimeError("poisoned prompt")
            self.prompts[new.req_id] = new.prompt_token_ids
            self.num_known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        req_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = [
            self._sample(r, computed[r] + scheduler_output.num_scheduled_tokens[r]) for r in req_ids
        ]
        return ModelRunnerOutput(req_ids, {r: i for i, r in enumerate(req_ids)}, sampled)

    def _forget(self, req_ids: set[str]) -> None:
        for req_id in req_ids:
            self.prompts.pop(req_id, None)
            self.num_known.pop(req_id, None)

    def _sample(self, req_id: str, num_computed: int) -> list[int]:
        if num_computed < self.num_known[req_id]:
            return []  # More of the prompt is to come.
        prompt = self.prompts[req_id]
        token = prompt[(self.num_known[req_id] - len(prompt)) % len(prompt)]
        self.num_known[req_id] += 1
        return [token]

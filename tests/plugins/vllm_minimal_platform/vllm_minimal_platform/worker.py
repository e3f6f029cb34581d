# SPDX-License-Identifier: Apache-2.0
"""The worker, with the methods that docs/platforms.md calls required and no other."""

from __future__ import annotations

import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase


class MinimalWorker(WorkerBase):
    """Hands everything to the core's model runner."""

    def init_device(self) -> None:
        self.model_runner = GPUModelRunner(self.vllm_config, torch.device("cpu"))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.load_model(load_dummy_weights)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        return 64 << 20

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

# SPDX-License-Identifier: Apache-2.0
"""The worker for GPUs, whatever their maker: memory and warm-up; the rest is the runner's.

The device is reached through the platform alone, its graphs too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import GiB
from vllm.utils.torch_utils import str_dtype_to_torch_dtype
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.warmup import warmup_steps
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

logger = init_logger(__name__)

# A prompt of several tokens and a step of one: both kinds of attention kernel.
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device: free when the engine took it, and what the engine may take in all."""

    free_at_start: int
    requested: int

    def for_kv_cache(self, free: int, peak: int) -> int:
        """What is left of the request, `free` bytes being free after the largest step and `peak`
        its own count of bytes in use. Others may have taken or given memory meanwhile, so that the
        larger of the two measures counts."""
        used = max(self.free_at_start - free, peak)
        return max(self.requested - used, 0)


class Worker(WorkerBase):
    """Runs the model on one GPU."""

    def init_device(self) -> None:
        """Takes the device.

        Raises:
            ValueError: it lacks the model's dtype, or less memory is free than was asked for.
        """
        self.device = current_platform.get_torch_device(self.local_rank)
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(str_dtype_to_torch_dtype(self.model_config.dtype))
        current_platform.manual_seed_all(self.model_config.seed)
        current_platform.empty_cache()
        free, total = current_platform.mem_get_info(self.device)
        share = self.cache_config.gpu_memory_utilization
        self.memory = MemoryUse(free, int(total * share))
        if self.cache_config.kv_cache_memory_bytes is None and free < self.memory.requested:
            raise ValueError(
                f"{free / GiB:.2f} of {total / GiB:.2f} GiB are free on {self.device}, less than "
                f"--gpu-memory-utilization {share} asks for ({self.memory.requested / GiB:.2f} GiB): "
                "lower it, or end what else runs there"
            )
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.load_model(load_dummy_weights)

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """What the user gave, else what weights and the largest step leave of
        `gpu_memory_utilization`."""
        self.model_runner.profile_run()
        current_platform.synchronize(self.device)
        # What the step took is still held by torch, so that it shows as not free.
        free, _ = current_platform.mem_get_info(self.device)
        peak = int(current_platform.get_current_memory_usage(self.device))
        current_platform.empty_cache()
        given = self.cache_config.kv_cache_memory_bytes
        if given is not None:
            return self._check_given(given)
        available = self.memory.for_kv_cache(free, peak)
        logger.info(
            "%.2f GiB for the KV cache, of %.2f GiB asked for",
            available / GiB,
            self.memory.requested / GiB,
        )
        return available

    def _check_given(self, given: int) -> int:
        free, _ = current_platform.mem_get_info(self.device)
        if given > free:
            raise ValueError(
                f"a KV cache of {given / GiB:.2f} GiB does not fit: {free / GiB:.2f} GiB are free on "
                f"{self.device} beside the model; lower --kv-cache-memory-bytes"
            )
        return given

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Runs a request, which compiles the kernels; then records graphs, if they are asked for."""
        begin = time.perf_counter()
        prompt_len = min(
            _WARM_UP_TOKENS,
            self.model_config.max_model_len - 1,
            self.scheduler_config.max_num_batched_tokens,
        )
        encoder_inputs = self.model_runner.model_state.dummy_encoder_inputs()
        kv_cache_config = self.model_runner.kv_cache_config
        for step in warmup_steps(kv_cache_config, prompt_len, encoder_inputs):
            if self.execute_model(step) is None:
                self.sample_tokens(None)
        self.model_runner.capture_model()
        current_platform.synchronize(self.device)
        return CompilationTimes(time.perf_counter() - begin, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def get_kv_connector_handshake_metadata(
        self,
    ) -> dict[tuple[int, int], KVConnectorHandshakeMetadata] | None:
        metadata = self.model_runner.kv_connector.get_handshake_metadata()
        return None if metadata is None else {(0, self.rank): metadata}

    def shutdown(self) -> None:
        self.model_runner.shutdown()

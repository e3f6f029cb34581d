# SPDX-License-Identifier: Apache-2.0
"""The CPU's worker: threads, memory and compiled kernels; the rest is the runner's."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger
from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.cpu_ops.kernel_library import compile_beside
from vllm.model_executor.layers.cpu_ops.step_memory import keep_freed_memory
from vllm.platforms import current_platform
from vllm.platforms.cpu_threads import bind_threads
from vllm.utils.mem_utils import GiB, host_memory
from vllm.utils.torch_utils import str_dtype_to_torch_dtype
from vllm.v1.attention.ops import cpu as cpu_attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_cache_memory import CacheMemory
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

logger = init_logger(__name__)
_R = TypeVar("_R")

# The host has other things to do: of the memory that is free the KV cache takes this share.
_FREE_MEMORY_SHARE = 0.25
# Steps of these sizes are run once at start: one token (matrix-vector) and many.
_WARM_UP_TOKENS = (1, 8, 64)
# Scratch memory, argument records, programs' memory and the threads that help with them are the
# process's: engines in several threads take turns, method by method. Nothing that a method leaves is in
# there, so that nobody holds this from one call to the next.
_TURN = threading.RLock()


class CPUWorker(WorkerBase):
    """Runs the model on the host's cores."""

    # Processes that compile kernels while the model is loaded, if any are needed.
    _compilers: tuple[subprocess.Popen, ...] = ()
    # Where the weights were when programs were recorded.
    _weights_at: list[int] | None = None

    def init_device(self) -> None:
        plan = bind_threads(self.local_rank)
        logger.debug("%d threads on cores %s", plan.num_threads, plan.cpus)
        cpu_ops.init_threads(plan.num_threads)
        dtype = self.model_config.dtype
        wanted = [cpu_attention.LIBRARY.missing(dtype)], cpu_ops.missing(dtype)
        self._compilers = tuple(filter(None, map(compile_beside, wanted)))
        self.device = torch.device("cpu")
        current_platform.manual_seed_all(self.model_config.seed)
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        try:
            with _TURN:
                self.model_runner.load_model(load_dummy_weights)
        except BaseException:
            self._end_compilers()
            raise

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """What the user gave, else what the largest batch can use, within a share of free memory.

        Raises:
            ValueError: the user gave more than there is.
        """
        free_bytes = host_memory().available_bytes
        given = self.cache_config.kv_cache_memory_bytes
        if given is not None:
            if given > free_bytes:
                raise ValueError(
                    f"a KV cache of {given / GiB:.2f} GiB does not fit: {free_bytes / GiB:.2f} GiB "
                    "are free; lower --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE"
                )
            return given
        max_num_seqs = self.scheduler_config.max_num_seqs
        per_request = sum(
            spec.max_memory_usage_bytes(self.vllm_config)
            for spec in self.get_kv_cache_spec().values()
        )
        # Page 0 of each layer is never handed out.
        null_page = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        return min(max_num_seqs * per_request + null_page, int(_FREE_MEMORY_SHARE * free_bytes))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)
        self._cache_memory = CacheMemory(self.model_runner.kv_caches, kv_cache_config.num_blocks)

    def use_idle_time(self) -> bool:
        return self._cache_memory.prepare(self.model_runner.block_tables.num_pages_seen())

    def compile_or_warm_up_model(self) -> CompilationTimes:
        begin = time.perf_counter()
        keep_freed_memory()
        with _TURN:
            dtype = str_dtype_to_torch_dtype(self.model_config.dtype)
            self._await_compilers()
            cpu_ops.warmup(dtype)
            cpu_attention.warmup(dtype)
            for num_tokens in _WARM_UP_TOKENS:
                if num_tokens <= self.scheduler_config.max_num_batched_tokens:
                    # The encoder has no kernels of its own to be made ready.
                    self.model_runner.profile_run(num_tokens, run_encoder=False)
            self.model_runner.capture_model()
            self._weights_at = self._weight_addresses()
        return CompilationTimes(time.perf_counter() - begin, 0.0)

    def _weight_addresses(self) -> list[int]:
        model = self.get_model()
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    def apply_model(self, fn: Callable[[nn.Module], _R]) -> _R:
        return self.run_function(lambda worker: fn(worker.get_model()))

    def run_function(self, function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        """As documented there. Weights that lie elsewhere afterwards are recorded anew."""
        with _TURN:
            try:
                return function(self, *args, **kwargs)
            finally:
                if self._weights_at not in (None, self._weight_addresses()):
                    logger.info("Weights were replaced: steps are recorded again")
                    self.model_runner.capture_model()
                    self._weights_at = self._weight_addresses()

    def _await_compilers(self) -> None:
        for process in self._compilers:
            if status := process.wait():
                logger.warning(
                    "A process that compiles CPU kernels ended with %d: they are compiled again",
                    status,
                )
        self._compilers = ()

    def _end_compilers(self) -> None:
        for process in self._compilers:
            process.kill()
            process.wait()
        self._compilers = ()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        with _TURN:
            return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        with _TURN:
            return self.model_runner.sample_tokens(grammar_output)

    def get_kv_connector_handshake_metadata(
        self,
    ) -> dict[tuple[int, int], KVConnectorHandshakeMetadata] | None:
        metadata = self.model_runner.kv_connector.get_handshake_metadata()
        return None if metadata is None else {(0, self.rank): metadata}

    def shutdown(self) -> None:
        self._end_compilers()
        self.model_runner.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""The engine core: an executor, its KV cache, a scheduler, and the step that ties them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.startup_timer import startup_timer
from vllm.v1.core.kv_cache_utils import (
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
    update_kv_cache_capacity,
)
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.beam_groups import BeamGroups
from vllm.v1.engine.kv_transfer import adapt_to_connector, introduce_workers
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.executor import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)

# What clients may call by name, besides adding and aborting requests.
UTILITIES = frozenset(
    {"get_supported_tasks", "reset_prefix_cache", "collective_rpc", "check_integrity"}
)


class EngineCore:
    """Runs requests: `add_request`, then `step` until they have ended. Not thread-safe, except for
    `preprocess_add_request`.

    Raises (constructor):
        ValueError: the config cannot be served; says what to change.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        executor_fail_callback: Callable[[], None] | None = None,
    ) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        if executor_class is None:
            from vllm.v1.executor import Executor

            executor_class = Executor.get_class(vllm_config)
        try:
            self._build(executor_class, executor_fail_callback)
        except (MemoryError, RuntimeError) as error:
            if not _is_for_want_of_memory(error):
                raise
            raise ValueError(_too_large(vllm_config, error)) from error
        vllm_config.seal()

    def _build(
        self,
        executor_class: type[Executor],
        executor_fail_callback: Callable[[], None] | None,
    ) -> None:
        vllm_config = self.vllm_config
        adapt_to_connector(vllm_config)
        with startup_timer.phase("executor"):
            self.model_executor = executor_class(vllm_config)
        if executor_fail_callback is not None:
            self.model_executor.register_failure_callback(executor_fail_callback)
        kv_cache_config = self._initialize_kv_caches()
        self.scheduler = self._make_scheduler(kv_cache_config)
        introduce_workers(self.scheduler, self.model_executor)
        self._beam_groups = BeamGroups(self.scheduler, vllm_config.model_config)

    def _initialize_kv_caches(self) -> KVCacheConfig:
        """Measures memory, makes the cache, and warms the model up."""
        executor = self.model_executor
        with startup_timer.phase("kv cache"):
            specs = executor.get_kv_cache_specs()
            # Models without attention keep nothing.
            available = executor.determine_available_memory() if any(specs) else [0] * len(specs)
            self._fit_max_model_len(specs, available)
            configs = get_kv_cache_configs(self.vllm_config, specs, available)
            kv_cache_config = generate_scheduler_kv_cache_config(configs)
            update_kv_cache_capacity(self.vllm_config, kv_cache_config)
            executor.initialize_from_config(configs)
        with startup_timer.phase("warm-up"):
            executor.compile_or_warm_up_model()
        return kv_cache_config

    def _fit_max_model_len(
        self, specs: list[dict[str, KVCacheSpec]], available_memory: list[int]
    ) -> None:
        """With max_model_len -1: the longest request that the cache holds on every worker."""
        model_config = self.vllm_config.model_config
        if model_config.original_max_model_len != -1:
            return
        fitting = min(
            (estimate_max_model_len(self.vllm_config, spec, memory)
             for spec, memory in zip(specs, available_memory) if spec),
            default=model_config.max_model_len,
        )  # fmt: skip
        if fitting < 1:
            raise ValueError(
                "the KV cache has no memory for even one token: give it more "
                "(--kv-cache-memory-bytes, --gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE)"
            )
        if fitting < model_config.max_model_len:
            logger.info(
                "max_model_len is %d: what the KV cache holds, not the model's %d",
                fitting, model_config.max_model_len,
            )  # fmt: skip
            model_config.max_model_len = fitting

    def _make_scheduler(self, kv_cache_config: KVCacheConfig) -> SchedulerInterface:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(
            kv_cache_config, self.vllm_config
        )
        cache_config = self.vllm_config.cache_config
        self.request_block_hasher = None
        if cache_config.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_fn)
            self.request_block_hasher = get_request_block_hasher(hash_block_size, hash_fn)
        return self.vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=None,
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=self.log_stats,
        )

    def preprocess_add_request(self, request: EngineCoreRequest) -> Request:
        """What can be done for a new request beside a running step: hashing its prompt.

        Raises:
            ValueError: it cannot be served.
        """
        return Request.from_engine_core_request(request, self.request_block_hasher)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use.
        """
        if request.sampling_params.beam_search is not None:
            self._beam_groups.add_request(request)
        else:
            self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; ids of requests that have ended are ignored."""
        self.scheduler.finish_requests(
            self._beam_groups.abort(request_ids), RequestStatus.FINISHED_ABORTED
        )

    def has_requests(self) -> bool:
        """Whether a step is due."""
        return self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedules, executes, updates.

        Returns:
            What each client, by index, is to be told; and whether anything was computed.
        """
        if not self.scheduler.has_requests():
            return {}, False
        scheduler_output = self.scheduler.schedule()
        model_output = self._execute_model(scheduler_output)
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        self._beam_groups.take_outputs(outputs)
        return outputs, scheduler_output.total_num_scheduled_tokens > 0

    def _execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            model_output = self.model_executor.execute_model(scheduler_output)
            if model_output is None:
                model_output = self.model_executor.sample_tokens(None)
            return model_output
        except Exception:
            # Lengths and pages only: prompts are nobody's business but their users'.
            logger.error(
                "the step failed: %d tokens of %d requests (tokens by request: %s; new: %s)",
                scheduler_output.total_num_scheduled_tokens,
                len(scheduler_output.num_scheduled_tokens),
                dict(list(scheduler_output.num_scheduled_tokens.items())[:32]),
                [new.anon_repr() for new in scheduler_output.scheduled_new_reqs[:8]],
            )
            raise

    def call_utility(self, method: str, args: Iterable[Any]) -> Any:
        """Calls one of `UTILITIES` by name.

        Raises:
            ValueError: it is none of them.
        """
        if method not in UTILITIES:
            raise ValueError(
                f"unknown engine utility {method!r}; there are: {', '.join(sorted(UTILITIES))}"
            )
        return getattr(self, method)(*args)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return ("generate",)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets the content of all pages; whether that was possible (not while requests run,
        unless they may start over)."""
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker; their results in order of rank."""
        return self.model_executor.collective_rpc(method, timeout, tuple(args), kwargs)

    def check_integrity(self) -> None:
        """Checks the books of the block pool; does nothing for schedulers that keep none.

        Raises:
            Exception: they contradict each other.
        """
        from vllm.v1.core.sched.scheduler import Scheduler

        if isinstance(self.scheduler, Scheduler):
            self.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Lets go of workers and scheduler."""
        self.scheduler.shutdown()
        self.model_executor.shutdown()


def _is_for_want_of_memory(error: MemoryError | RuntimeError) -> bool:
    """torch's allocator of the host raises plain RuntimeErrors."""
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _too_large(vllm_config: VllmConfig, error: MemoryError | RuntimeError) -> str:
    """What to lower when the memory for something is not to be had."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    sizes = {
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--max-model-len": vllm_config.model_config.max_model_len,
        "--num-gpu-blocks-override": cache.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": cache.kv_cache_memory_bytes,
    }
    given = ", ".join(f"{flag} {size}" for flag, size in sizes.items() if size is not None)
    return f"there is not enough memory ({error}): lower one of {given}"

# SPDX-License-Identifier: Apache-2.0
"""What runs the workers of one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

FailureCallback = Callable[[], None]


class Executor(ABC):
    """Calls every worker. Each method that asks for something gives one answer a worker."""

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The executor that `distributed_executor_backend` names.

        Raises:
            ValueError: it names none.
        """
        backend = vllm_config.parallel_config.distributed_executor_backend or "uni"
        if isinstance(backend, type):
            return backend
        if backend == "uni":
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            return UniProcExecutor
        if "." in backend:
            return resolve_obj_by_qualname(backend)
        raise ValueError(
            f"distributed_executor_backend {backend!r} is not supported; supported: uni, or the "
            "dotted name of an Executor class"
        )

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._init_executor()

    @abstractmethod
    def _init_executor(self) -> None:
        """Makes the workers, with their devices and models."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` (a worker's, by name, or a function of the worker) on every worker."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises if a worker cannot go on."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """`callback` is called when a worker dies. Workers of this process cannot die alone."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Each worker's layers and what they need of the KV cache per page."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        """Bytes each worker has for the KV cache."""
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Makes each worker's KV cache."""
        for rank, kv_cache_config in enumerate(kv_cache_configs):
            self._call_worker(rank, "initialize_from_config", kv_cache_config)

    def get_kv_connector_handshake_metadata(
        self,
    ) -> list[dict[tuple[int, int], KVConnectorHandshakeMetadata] | None]:
        """What the KV connector's peers must know of each worker."""
        return self.collective_rpc("get_kv_connector_handshake_metadata")

    def compile_or_warm_up_model(self) -> None:
        """Does what would make the first request slow."""
        self.collective_rpc("compile_or_warm_up_model")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step. None: the output comes from `sample_tokens`."""
        return self.collective_rpc("execute_model", args=(scheduler_output,))[0]

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        """The output of the step that `execute_model` ran."""
        return self.collective_rpc("sample_tokens", args=(grammar_output,))[0]

    def use_idle_time(self) -> bool:
        """As a worker's: whether any of them had something to do."""
        return False

    def shutdown(self) -> None:
        """Ends the workers."""
        self.collective_rpc("shutdown")

    @abstractmethod
    def _call_worker(self, rank: int, method: str, *args: Any) -> Any:
        """Calls one worker's method."""

# SPDX-License-Identifier: Apache-2.0
"""What a worker is: it owns a device and runs the model there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import nn

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

_R = TypeVar("_R")


class CompilationTimes(NamedTuple):
    """Seconds spent on compiling and warming up."""

    language_model: float
    encoder: float


class WorkerBase:
    """The worker's interface. Methods that raise must be overridden; the others may be.

    They are called in this order: `init_device`, `load_model`, `get_kv_cache_spec`,
    `determine_available_memory`, `initialize_from_config`, `compile_or_warm_up_model`; then
    `execute_model` and, when that gives None, `sample_tokens`, step by step; last `shutdown`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.device_config = vllm_config.device_config
        self.load_config = vllm_config.load_config
        self.local_rank = local_rank
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker

    def init_device(self) -> None:
        """Takes the device; nothing has touched it before."""
        raise NotImplementedError

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Makes the model and reads its weights."""
        raise NotImplementedError

    def get_model(self) -> nn.Module:
        """The model."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer needs of the KV cache per page, by name."""
        raise NotImplementedError

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache."""
        raise NotImplementedError

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Makes the KV cache."""
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Does what would make the first request slow."""
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step. None: the output comes from `sample_tokens`."""
        raise NotImplementedError

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        """The output of the step that `execute_model` ran."""
        raise NotImplementedError

    def use_idle_time(self) -> bool:
        """Called again and again while there is no request: a millisecond or two of what makes later
        steps faster. False: there is nothing to do."""
        return False

    def check_health(self) -> None:
        """Raises if the worker cannot go on."""

    def get_kv_connector_handshake_metadata(
        self,
    ) -> dict[tuple[int, int], KVConnectorHandshakeMetadata] | None:
        """What the KV connector's peers must know of this worker, by (pipeline rank,
        tensor-parallel rank); None if there is nothing."""
        return None

    def update_max_model_len(self, max_model_len: int) -> None:
        """The longest request became shorter, since the KV cache does not hold more; called before
        `initialize_from_config`."""
        self.model_config.max_model_len = max_model_len

    def apply_model(self, fn: Callable[[nn.Module], _R]) -> _R:
        """`fn` of the model."""
        return fn(self.get_model())

    def run_function(self, function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        """`function` of this worker, which may change anything, the model's weights too."""
        return function(self, *args, **kwargs)

    def shutdown(self) -> None:
        """Frees what the worker holds."""


def make_worker(vllm_config: VllmConfig, local_rank: int, rank: int) -> WorkerBase:
    """The worker that `parallel_config.worker_cls` names, with the methods of
    `worker_extension_cls` if one is given.

    Raises:
        ImportError: a name leads nowhere.
        ValueError: the extension would replace a worker's method.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    config = vllm_config.parallel_config
    worker_cls: type[Any] = resolve_obj_by_qualname(config.worker_cls)
    if config.worker_extension_cls:
        extension = resolve_obj_by_qualname(config.worker_extension_cls)
        taken = [n for n in vars(extension) if n in dir(worker_cls) and not n.startswith("__")]
        if taken:
            raise ValueError(
                f"{config.worker_extension_cls} would replace methods of {config.worker_cls}: "
                f"{', '.join(taken)}; rename them"
            )
        worker_cls = type(worker_cls.__name__, (worker_cls, extension), {})
    return worker_cls(
        vllm_config=vllm_config,
        local_rank=local_rank,
        rank=rank,
        distributed_init_method="",
        is_driver_worker=rank == 0,
    )

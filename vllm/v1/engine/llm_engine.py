# SPDX-License-Identifier: Apache-2.0
"""The engine for programs that run step by step: `LLM` is built on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.utils.startup_timer import startup_timer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor, is_for_engine_core, split_request
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager
from vllm.v1.metrics.reader import Metric, get_metrics_snapshot
from vllm.v1.metrics.stats import IterationStats

if TYPE_CHECKING:
    from torch import nn

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor import Executor

logger = init_logger(__name__)


class LLMEngine:
    """`add_request`, then `step` while `has_unfinished_requests`.

    Args of the constructor:
        executor_class: None: the config's.
        log_stats: keep statistics: the log line, Prometheus, `stat_loggers` and those of plugins.
        multiprocess_mode: run the engine core in a process of its own.

    Raises:
        ValueError: the config cannot be served; says what to change.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = False,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        multiprocess_mode: bool = False,
    ) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.log_stats = log_stats
        with startup_timer.phase("tokenizer"):
            self.input_processor = InputProcessor(vllm_config)
        self.output_processor = OutputProcessor(self.input_processor.tokenizer, log_stats=log_stats)
        self.engine_core = EngineCoreClient.make_client(
            multiprocess_mode, vllm_config, executor_class, log_stats
        )
        self.logger_manager = StatLoggerManager(vllm_config, stat_loggers) if log_stats else None
        if self.logger_manager is not None:
            self.logger_manager.log_engine_initialized()
        self._last_log_time = time.monotonic()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """As the constructor; VLLM_ENABLE_V1_MULTIPROCESSING says in which process it runs."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """From arguments."""
        return cls(
            engine_args.create_engine_config(),
            log_stats=not engine_args.disable_log_stats,
            stat_loggers=stat_loggers,
            multiprocess_mode=enable_multiprocessing or envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        )

    def get_num_unfinished_requests(self) -> int:
        """Completions under way."""
        return self.output_processor.get_num_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self.output_processor.has_unfinished_requests()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return tuple(self.engine_core.call_utility("get_supported_tasks"))

    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Starts a request; returns `request_id`.

        Raises:
            ValueError: prompt or parameters cannot be served.
        """
        if isinstance(prompt, EngineCoreRequest):
            request = prompt
        else:
            request, prompt_text = self.input_processor.process_inputs(
                request_id, prompt, params, arrival_time, tokenization_kwargs, trace_headers,
                priority,
            )  # fmt: skip
        for child, parent, index in split_request(request):
            self.output_processor.add_request(child, prompt_text, parent, index)
            if is_for_engine_core(child, index):
                self.engine_core.add_request(child)
        return request_id

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        """Ends requests; they give no further output. Unknown ids are ignored."""
        stats = IterationStats() if self.log_stats else None
        ended = self.output_processor.abort_requests(request_ids, internal, stats)
        self.engine_core.abort_requests(ended.reqs_to_abort)
        if stats is not None:
            self.logger_manager.record(None, stats)

    def step(self) -> list[RequestOutput]:
        """Runs a step, or waits for one; gives what it brought.

        Raises:
            EngineDeadError: the engine core's process is dead.
        """
        outputs = self.engine_core.get_output()
        stats = IterationStats() if self.log_stats else None
        processed = self.output_processor.process_outputs(
            outputs.outputs, outputs.timestamp, stats
        )
        self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None:
            self.logger_manager.record(outputs.scheduler_stats, stats)
            self.do_log_stats_with_interval()
        return processed.request_outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empties the prefix cache; False if requests that run keep it in use."""
        return self.engine_core.call_utility(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )

    def get_metrics(self) -> list[Metric]:
        """The Prometheus metrics as they are now.

        Raises:
            ValueError: statistics are off.
        """
        if not self.log_stats:
            raise ValueError("statistics are off, so there are no metrics; disable_log_stats=False")
        return get_metrics_snapshot()

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """The model's tokenizer; None where none was loaded."""
        return self.input_processor.tokenizer

    def get_tokenizer(self) -> TokenizerLike:
        """The model's tokenizer.

        Raises:
            ValueError: none was loaded.
        """
        return self.input_processor.get_tokenizer()

    def do_log_stats(self) -> None:
        """Logs a line of statistics, unless nothing has happened."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    def do_log_stats_with_interval(self) -> None:
        """`do_log_stats`, at most every VLLM_LOG_STATS_INTERVAL seconds."""
        now = time.monotonic()
        if now - self._last_log_time >= envs.VLLM_LOG_STATS_INTERVAL:
            self._last_log_time = now
            self.do_log_stats()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` (a worker's, by name, or a function of the worker) on every worker.

        Raises:
            TypeError: a function, where the workers are in another process.
        """
        return self.engine_core.call_utility("collective_rpc", method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Calls `func` with every worker's model.

        Raises:
            TypeError: the workers are in another process.
        """
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine core."""
        self.engine_core.shutdown(timeout)
        self.output_processor.propagate_error(RuntimeError("the engine was shut down"))

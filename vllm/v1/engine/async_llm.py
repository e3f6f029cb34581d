# SPDX-License-Identifier: Apache-2.0
"""The engine for servers: requests are coroutines, the engine core runs in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.inputs import PromptType
from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.utils.startup_timer import startup_timer
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor, is_for_engine_core, split_request
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.request_state import RequestOutputCollector
from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.launch import EngineCoreProcess
    from vllm.v1.executor import Executor

logger = init_logger(__name__)

# Outputs handled before other coroutines get their turn.
_OUTPUT_CHUNK = 128
# A longer text is tokenised in a thread, so that the event loop goes on.
_LONG_TEXT = 4096


class AsyncLLM:
    """See the module. Belongs to the event loop that first uses it.

    Args of the constructor:
        vllm_config: the config; `max_model_len` and the cache's size are final in it afterwards.
        executor_class: None: the config's, found out in the engine's process.
        log_stats: keep statistics: the log line, Prometheus, `stat_loggers` and those of plugins.
        log_requests: log each request.
        stat_loggers: further loggers.
        engine_process: one that was launched early (`launch_engine_core`).

    Raises:
        ValueError: the config cannot be served; says what to change.
        RuntimeError: the engine core could not start.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        *,
        log_requests: bool = False,
        stat_loggers: list[StatLoggerFactory] | None = None,
        engine_process: EngineCoreProcess | None = None,
    ) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.log_requests = log_requests
        self.log_stats = log_stats
        self._tasks: list[asyncio.Task] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death_callbacks: list[Callable[[], None]] = []
        self._is_stopped = False
        # The engine core loads while the tokenizer is made here.
        self.engine_core = AsyncMPClient(vllm_config, executor_class, log_stats, engine_process)
        try:
            with startup_timer.phase("tokenizer"):
                self.input_processor = InputProcessor(vllm_config)
            self.output_processor = OutputProcessor(
                self.input_processor.tokenizer,
                log_stats=log_stats,
                stream_interval=vllm_config.scheduler_config.stream_interval,
            )
            self.engine_core.wait_until_ready()
        except BaseException:
            self.engine_core.shutdown()
            raise
        self.engine_core.on_death = self._on_death
        if self.encoder_decoder is not None:
            self.encoder_decoder.prepare_in_background()
        self.logger_manager = StatLoggerManager(vllm_config, stat_loggers) if log_stats else None
        if self.logger_manager is not None:
            self.logger_manager.log_engine_initialized()
        self._start_tasks_if_in_a_loop()

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
        engine_process: EngineCoreProcess | None = None,
    ) -> AsyncLLM:
        """As the constructor."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
            engine_process=engine_process,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        *,
        stat_loggers: list[StatLoggerFactory] | None = None,
    ) -> AsyncLLM:
        """From arguments; starts the engine's process before it makes their config."""
        from vllm.v1.engine.launch import launch_engine_core

        process = launch_engine_core()
        try:
            vllm_config = engine_args.create_engine_config()
            return cls.from_vllm_config(
                vllm_config,
                stat_loggers=stat_loggers,
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
                engine_process=process,
            )
        except BaseException:
            process.shutdown()
            raise

    # Requests

    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, as its `output_kind` asks for them. Closing the generator, or
        cancelling the task that waits for it, aborts the request.

        Raises:
            ValueError: prompt or parameters cannot be served.
            EngineGenerateError: this request failed; others go on.
            EngineDeadError: the engine is dead.
        """
        queue: RequestOutputCollector | None = None
        finished = False
        try:
            queue = await self.add_request(
                request_id,
                prompt,
                sampling_params,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                prompt_text=prompt_text,
            )
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        finally:
            if queue is not None and not finished:
                self._abort(queue.request_id)

    async def add_request(
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
    ) -> RequestOutputCollector:
        """Starts a request; its outputs come through the queue that is returned.

        Raises:
            ValueError: prompt or parameters cannot be served.
            EngineDeadError: the engine is dead.
        """
        self._raise_if_dead()
        self._start_tasks()
        if isinstance(prompt, EngineCoreRequest):
            request = prompt
        else:
            request, prompt_text = await self._process_inputs(
                request_id, prompt, params, arrival_time or time.time(), tokenization_kwargs,
                trace_headers, priority,
            )  # fmt: skip
        queue = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        for child, parent, index in split_request(request):
            self.output_processor.add_request(child, prompt_text, parent, index, queue)
            if is_for_engine_core(child, index):
                self.engine_core.add_request(child)
        if self.log_requests:
            logger.info(
                "Added request %s: %d prompt tokens, %s",
                request_id, len(request.prompt_token_ids), request.sampling_params,
            )  # fmt: skip
        return queue

    async def _process_inputs(
        self, request_id: str, prompt: PromptType, *args: Any
    ) -> tuple[EngineCoreRequest, str | None]:
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            text = prompt["prompt"]
        process = self.input_processor.process_inputs
        # The first prompt for an encoder imports the model's class, and images take long.
        if len(text) > _LONG_TEXT or self.input_processor.encoder_decoder is not None:
            return await asyncio.to_thread(process, request_id, prompt, *args)
        return process(request_id, prompt, *args)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests: their generators end with finish_reason abort. Unknown ids are ignored.

        Args:
            request_id: the client's ids, or with `internal` the engine's.
        """
        ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        self._abort(*ids, internal=internal)

    def _abort(self, *request_ids: str, internal: bool = True) -> None:
        stats = IterationStats() if self.log_stats else None
        ended = self.output_processor.abort_requests(request_ids, internal, stats)
        self.engine_core.abort_requests(ended.reqs_to_abort)
        if stats is not None and ended.reqs_to_abort:
            self.logger_manager.record(None, stats)
        if self.log_requests and ended.reqs_to_abort:
            logger.info("Aborted request(s) %s", ", ".join(request_ids))

    # What comes from the engine core

    def _start_tasks_if_in_a_loop(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # The first request starts them.
        self._start_tasks()

    def _start_tasks(self) -> None:
        if self._tasks:
            return
        self._loop = asyncio.get_running_loop()
        self._tasks.append(self._loop.create_task(self._handle_outputs()))
        if self.log_stats:
            self._tasks.append(self._loop.create_task(self._log_periodically()))

    async def _handle_outputs(self) -> None:
        try:
            while True:
                outputs = await self.engine_core.get_output_async()
                await self._process_outputs(outputs)
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self._fail_requests(error)
        except Exception as error:
            # A fault here: outputs of all requests would be lost without a word.
            logger.exception("the output handler has failed; every request ends with an error")
            self.engine_core.dead_error = EngineDeadError(f"the output handler failed: {error}")
            self._fail_requests(self.engine_core.dead_error)
            self._on_death()
        finally:
            self.engine_core.close_output()

    def _fail_requests(self, error: EngineDeadError) -> None:
        self.output_processor.propagate_error(error)
        if self.logger_manager is not None:
            self.logger_manager.record(SchedulerStats(), None)

    async def _process_outputs(self, outputs: EngineCoreOutputs) -> None:
        """A large batch in parts, so that other coroutines are not kept waiting."""
        stats = IterationStats() if self.log_stats and outputs.outputs else None
        for begin in range(0, len(outputs.outputs), _OUTPUT_CHUNK):
            if begin:
                await asyncio.sleep(0)
            processed = self.output_processor.process_outputs(
                outputs.outputs[begin : begin + _OUTPUT_CHUNK], outputs.timestamp, stats
            )
            self.engine_core.abort_requests(processed.reqs_to_abort)
        if self.logger_manager is not None:
            self.logger_manager.record(outputs.scheduler_stats, stats)

    async def _log_periodically(self) -> None:
        while not self.errored:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self.do_log_stats()

    async def do_log_stats(self) -> None:
        """Logs a line of statistics, unless nothing has happened. Called by itself every
        VLLM_LOG_STATS_INTERVAL seconds."""
        if self.logger_manager is not None:
            self.logger_manager.log()

    # Life and death

    def add_death_callback(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, in the event loop if there is one, when the engine dies; at
        once if it is dead."""
        self._death_callbacks.append(callback)
        if self.errored:
            self._on_death()

    def _on_death(self) -> None:
        """Comes from the thread that watches the process."""
        callbacks, self._death_callbacks = self._death_callbacks, []
        for callback in callbacks:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(callback)
            else:
                callback()

    def _raise_if_dead(self) -> None:
        if self._is_stopped or self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return not (self._is_stopped or self.errored)

    @property
    def is_stopped(self) -> bool:
        """Whether it was shut down or has died."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died (not: was shut down)."""
        return self.engine_core.is_dead()

    @property
    def dead_error(self) -> EngineDeadError:
        """What requests to a dead engine get."""
        error = EngineDeadError("it was shut down" if self._is_stopped else "")
        error.__cause__ = self.engine_core.dead_error
        return error

    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine is dead.
        """
        self._raise_if_dead()

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Returns once no request is under way.

        Raises:
            TimeoutError: after `drain_timeout` seconds some still are.
        """
        await asyncio.wait_for(
            self.output_processor.wait_for_requests_to_drain(), timeout=drain_timeout
        )

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine; requests under way get an EngineDeadError. May be called twice."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.engine_core.shutdown(timeout)
        self._fail_requests(self.dead_error)
        if self._loop is not None and not self._loop.is_closed():
            for task in self._tasks:
                self._loop.call_soon_threadsafe(task.cancel)

    # Questions and commands

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """The model's tokenizer; None where none was loaded."""
        return self.input_processor.tokenizer

    @property
    def encoder_decoder(self) -> EncoderDecoderPreprocessor | None:
        """What processes the prompts of an encoder-decoder model; None: the model is none."""
        return self.input_processor.encoder_decoder

    def get_tokenizer(self) -> TokenizerLike | None:
        """The model's tokenizer; None where none was loaded."""
        return self.input_processor.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return tuple(await self._call("get_supported_tasks"))

    async def is_tracing_enabled(self) -> bool:
        """Tracing is not supported."""
        return False

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empties the prefix cache; False if requests that run keep it in use."""
        return await self._call("reset_prefix_cache", reset_running_requests, reset_connector)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a worker's method by name, with data as arguments; gives the workers' results.

        Raises:
            RuntimeError: it failed.
        """
        return await self._call("collective_rpc", method, timeout, list(args), kwargs)

    async def _call(self, method: str, *args: Any) -> Any:
        self._raise_if_dead()
        self._start_tasks()
        return await self.engine_core.call_utility_async(method, *args)

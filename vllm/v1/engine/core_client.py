# SPDX-License-Identifier: Apache-2.0
"""The engine core as its front sees it: in this process, or in one of its own over ZMQ."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq.asyncio

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.launch import EngineCoreProcess, launch_engine_core
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

logger = init_logger(__name__)

# A step computed nothing, as keys and values are on their way: no need to ask at once again.
_PAUSE_S = 0.001


class EngineCoreClient(ABC):
    """What `LLMEngine` needs of an engine core."""

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
    ) -> EngineCoreClient:
        """An engine core in a process of its own, or in this one."""
        kind = SyncMPClient if multiprocess_mode else InprocClient
        return kind(vllm_config, executor_class, log_stats)

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits for them, or makes them.

        Raises:
            EngineDeadError: the engine core is dead.
        """

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request.

        Raises:
            EngineDeadError: the engine core is dead.
        """

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests; they give no further output. Does nothing on a dead engine core."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of `vllm.v1.engine.core.UTILITIES`.

        Raises:
            RuntimeError: it failed, in another process; in this one, whatever it raised.
            EngineDeadError: the engine core is dead.
        """

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine core; waits `timeout` seconds for a step that is running."""


class InprocClient(EngineCoreClient):
    """The engine core in this process: `get_output` runs a step."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
    ) -> None:
        from vllm.v1.engine.core import EngineCore

        self.engine_core = EngineCore(vllm_config, executor_class, log_stats)

    def get_output(self) -> EngineCoreOutputs:
        outputs, has_computed = self.engine_core.step()
        if not has_computed and self.engine_core.has_requests():
            time.sleep(_PAUSE_S)
        return outputs.get(0) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        return self.engine_core.call_utility(method, args)

    def shutdown(self, timeout: float | None = None) -> None:
        self.engine_core.shutdown()


class _MPClient:
    """What both clients of an engine core process share: its start, its death, and sending."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        engine_process: EngineCoreProcess | None,
    ) -> None:
        self.engine_process = engine_process or launch_engine_core()
        if not self.engine_process.is_config_sent:
            self.engine_process.send_config(vllm_config, executor_class, log_stats)
        self.dead_error: EngineDeadError | None = None
        self._is_shut_down = False
        self.on_death: Callable[[], None] | None = None
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._send_lock = threading.Lock()
        self._call_ids = itertools.count()

    def wait_until_ready(self) -> None:
        """Waits until the engine core takes requests.

        Raises:
            ValueError, RuntimeError: it could not start.
        """
        self.engine_process.wait_until_ready()
        self._input = self.engine_process.input_socket
        self._output = self.engine_process.output_socket
        this = weakref.ref(self)
        self.engine_process.watch(lambda error: _tell_of_death(this, error))

    def is_dead(self) -> bool:
        """Whether the engine core has ended without having been told to."""
        return self.dead_error is not None

    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return not (self._is_shut_down or self.is_dead())

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("it was shut down")
        if self.dead_error is not None:
            # A fresh one each time: tracebacks pile up on an exception that is raised again.
            raise EngineDeadError() from self.dead_error

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self._check_alive()
        # Sockets and the encoder are not thread-safe; a send never waits.
        with self._send_lock:
            payload = self._encoder.encode(message)
            self._input.send_multipart((kind.value, payload))

    def _decode(self, frame: bytes) -> EngineCoreOutputs:
        """Raises:
        EngineDeadError: the empty message of the watch over the process."""
        if not frame:
            self._check_alive()
        return self._decoder.decode(frame)

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine core's process."""
        self._is_shut_down = True
        self.engine_process.shutdown(5.0 if timeout is None else timeout)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.engine_process.close_sockets()


def _tell_of_death(client: weakref.ref[_MPClient], error: EngineDeadError) -> None:
    this = client()
    if this is None:
        return
    this.dead_error = error
    if this.on_death is not None:
        this.on_death()


def _utility_result(answer: UtilityOutput) -> Any:
    if answer.failure_message is not None:
        raise RuntimeError(f"the engine core refused or failed: {answer.failure_message}")
    return answer.result


def _check_sendable(method: str, args: tuple[Any, ...]) -> None:
    if any(callable(arg) for arg in args):
        raise TypeError(
            f"{method} takes no functions here: the engine runs in a process of its own. Name a "
            "method of the worker, or use `LLM` with VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )


class SyncMPClient(_MPClient, EngineCoreClient):
    """For callers that wait, such as `LLM`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        engine_process: EngineCoreProcess | None = None,
    ) -> None:
        super().__init__(vllm_config, executor_class, log_stats, engine_process)
        self.wait_until_ready()
        self._set_aside: list[EngineCoreOutputs] = []

    def get_output(self) -> EngineCoreOutputs:
        if self._set_aside:
            return self._set_aside.pop(0)
        self._check_alive()
        return self._decode(self._output.recv())

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and self.is_open():
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        _check_sendable(method, args)
        call_id = next(self._call_ids)
        self._send(EngineCoreRequestType.UTILITY, (call_id, method, args))
        while True:
            outputs = self._decode(self._output.recv())
            answer = outputs.utility_output
            if answer is not None and answer.call_id == call_id:
                return _utility_result(answer)
            self._set_aside.append(outputs)


class AsyncMPClient(_MPClient):
    """For `AsyncLLM`. One task calls `get_output_async` all the time: it also receives the answers
    to utilities."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None = None,
        log_stats: bool = True,
        engine_process: EngineCoreProcess | None = None,
    ) -> None:
        super().__init__(vllm_config, executor_class, log_stats, engine_process)
        self._answers: dict[int, asyncio.Future[UtilityOutput]] = {}
        self._async_output: zmq.asyncio.Socket | None = None

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs of requests.

        Raises:
            EngineDeadError: the engine core is dead.
        """
        if self._async_output is None:
            # Belongs to the event loop that it is first used in.
            self._async_output = self.engine_process.output_owner
        try:
            while True:
                self._check_alive()
                outputs = self._decode(await self._async_output.recv())
                if outputs.utility_output is None:
                    return outputs
                answer = self._answers.pop(outputs.utility_output.call_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(outputs.utility_output)
        except EngineDeadError as error:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)
            self._answers.clear()
            raise

    def close_output(self) -> None:
        """Nobody will call `get_output_async` any more. Only in its event loop."""
        if self._async_output is not None:
            self._async_output.close()

    def _close_sockets(self) -> None:
        # What the event loop reads is closed there.
        if self._async_output is None:
            super()._close_sockets()
        elif not self._input.closed:
            self._input.close()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request; waits for nothing.

        Raises:
            EngineDeadError: the engine core is dead.
        """
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests; they give no further output. Does nothing on a dead engine core."""
        if request_ids and self.is_open():
            self._send(EngineCoreRequestType.ABORT, request_ids)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Calls one of `vllm.v1.engine.core.UTILITIES`.

        Raises:
            RuntimeError: it failed.
            EngineDeadError: the engine core is dead.
        """
        _check_sendable(method, args)
        call_id = next(self._call_ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(EngineCoreRequestType.UTILITY, (call_id, method, args))
            return _utility_result(await answer)
        finally:
            self._answers.pop(call_id, None)

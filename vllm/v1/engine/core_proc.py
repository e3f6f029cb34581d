# SPDX-License-Identifier: Apache-2.0
"""The engine core over ZMQ. Messages are decoded and encoded in threads of their own, beside the
forward pass, which does not hold the interpreter."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from vllm.logger import init_logger
from vllm.utils.startup_timer import startup_timer
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.launch import EngineCoreReady
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.v1.engine.launch import EngineCoreStart

logger = init_logger(__name__)

# A step was due but computed nothing: wait that long for news rather than spin.
_PAUSE_S = 0.001


class UtilityCall(msgspec.Struct, array_like=True):
    """A utility by name; the answer bears the same `call_id`."""

    call_id: int
    method: str
    args: list[Any]


class EngineCoreProc:
    """Serves one front: an input thread, the engine's loop, an output thread.

    input socket -> input thread: decode, hash the prompt -> inbox -> loop: step
    -> outbox -> output thread: encode -> output socket
    """

    def __init__(self, start: EngineCoreStart) -> None:
        self._inbox: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()
        self._is_shutting_down = False
        self._context = zmq.Context()
        self._input = self._socket(zmq.PULL)
        self._input.bind(start.input_address)
        self._output = self._socket(zmq.PUSH)
        self._output.connect(start.output_address)
        self.engine_core = EngineCore(
            start.vllm_config, start.executor_class, start.log_stats, self._executor_failed
        )
        self._input.recv()  # The front's hello: now both sockets are connected.
        self._send_ready()

    def _socket(self, kind: int) -> zmq.Socket:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        return made

    def _send_ready(self) -> None:
        config = self.engine_core.vllm_config
        response = EngineCoreReadyResponse(
            max_model_len=config.model_config.max_model_len,
            num_gpu_blocks=config.cache_config.num_gpu_blocks,
            block_size=config.cache_config.block_size,
            dtype=str(config.model_config.dtype),
            vllm_version=__version__,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            instance_id=config.instance_id,
            kv_cache_size_tokens=config.cache_config.kv_cache_size_tokens,
            kv_cache_max_concurrency=config.cache_config.kv_cache_max_concurrency,
        )
        self._output.send(msgspec.msgpack.encode(EngineCoreReady(response, startup_timer.phases)))

    def request_shutdown(self) -> None:
        """Lets the loop end after the step that is running. From any thread."""
        self._is_shutting_down = True
        self._inbox.put((EngineCoreRequestType.WAKEUP, None))

    def _executor_failed(self) -> None:
        self._inbox.put((EngineCoreRequestType.EXECUTOR_FAILED, "a worker has died"))

    def run(self) -> int:
        """Serves until told to stop; returns the process's exit status."""
        self._start_thread(self._run_input, "engine-input")
        output = self._start_thread(self._run_output, "engine-output")
        try:
            self._run_loop()
        except Exception:
            # One batch holds many requests, and nobody knows what state it left behind: the front
            # fails them all.
            logger.exception("the engine core has failed; every request ends with an error")
            return 1
        finally:
            self._outbox.put(None)
            output.join(timeout=2.0)
        self.engine_core.shutdown()
        return 0

    def _start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except Exception:
                logger.exception("thread %s has failed", name)
                failure = f"thread {name} has failed"
                self._inbox.put((EngineCoreRequestType.EXECUTOR_FAILED, failure))

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    # The loop

    def _run_loop(self) -> None:
        while not self._is_shutting_down:
            self._take_in_what_has_come()
            outputs, has_computed = self.engine_core.step()
            for made in outputs.values():
                self._outbox.put(made)
            if not has_computed and self.engine_core.has_requests():
                self._wait_for_news(_PAUSE_S)

    def _take_in_what_has_come(self) -> None:
        """Handles every message that is there; with nothing to compute, waits for one."""
        if not self.engine_core.has_requests():
            while self._inbox.empty() and self.engine_core.model_executor.use_idle_time():
                pass
            self._handle(*self._inbox.get())
        while not self._inbox.empty():
            self._handle(*self._inbox.get())

    def _wait_for_news(self, timeout_s: float) -> None:
        try:
            self._handle(*self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            pass

    def _handle(self, kind: EngineCoreRequestType, payload: Any) -> None:
        if kind is EngineCoreRequestType.ADD:
            self._add_request(payload)
        elif kind is EngineCoreRequestType.ABORT:
            self.engine_core.abort_requests(payload)
        elif kind is EngineCoreRequestType.UTILITY:
            self._answer(payload)
        elif kind is EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError(payload)

    def _add_request(self, request: Request) -> None:
        try:
            self.engine_core.add_request(request)
        except Exception as error:
            self._refuse(request.request_id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        """Ends a request that could not even be queued; nobody else is touched."""
        is_ours = not isinstance(error, ValueError)
        logger.warning("request %s was refused: %s", request_id, error, exc_info=is_ours)
        output = EngineCoreOutput(
            request_id,
            [],
            finish_reason=FinishReason.ERROR,
            error_message=str(error),
            is_engine_fault=is_ours,
        )
        self._outbox.put(EngineCoreOutputs(outputs=[output]))

    def _answer(self, call: UtilityCall) -> None:
        answer = UtilityOutput(call.call_id)
        try:
            answer.result = self.engine_core.call_utility(call.method, call.args)
        except Exception as error:
            logger.warning("utility %s failed", call.method, exc_info=True)
            answer.failure_message = f"{type(error).__name__}: {error}"
        self._outbox.put(EngineCoreOutputs(utility_output=answer))

    # The threads

    def _run_input(self) -> None:
        decode: dict[EngineCoreRequestType, Callable[[bytes], Any]] = {
            EngineCoreRequestType.ADD: self._request_decoder(),
            EngineCoreRequestType.ABORT: MsgpackDecoder(list[str]).decode,
            EngineCoreRequestType.UTILITY: MsgpackDecoder(UtilityCall).decode,
        }
        while True:
            kind_frame, payload = self._input.recv_multipart()
            kind = EngineCoreRequestType(kind_frame)
            message = decode[kind](payload)
            if message is not None:
                self._inbox.put((kind, message))

    def _request_decoder(self) -> Callable[[bytes], Request | None]:
        """Bytes to a request ready for the scheduler; None if it was refused."""
        decode = MsgpackDecoder(EngineCoreRequest).decode

        def decode_request(payload: bytes) -> Request | None:
            try:
                return self.engine_core.preprocess_add_request(decode(payload))
            except Exception as error:
                # The id comes first, whatever is wrong with the rest.
                self._refuse(msgspec.msgpack.decode(payload)[0], error)
                return None

        return decode_request

    def _run_output(self) -> None:
        encoder = MsgpackEncoder()
        while (outputs := self._outbox.get()) is not None:
            try:
                frame = encoder.encode(outputs)
            except TypeError as error:
                frame = encoder.encode(_undeliverable(outputs, error))
            self._output.send(frame)
        self._output.close(linger=1000)


def _undeliverable(outputs: EngineCoreOutputs, error: TypeError) -> EngineCoreOutputs:
    """A utility's result may be anything; outputs of requests are always data."""
    if outputs.utility_output is None:
        raise error
    call_id = outputs.utility_output.call_id
    return EngineCoreOutputs(utility_output=UtilityOutput(call_id, f"TypeError: {error}"))

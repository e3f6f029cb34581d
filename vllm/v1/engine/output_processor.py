# SPDX-License-Identifier: Apache-2.0
"""Engine core outputs to request outputs: text, stop strings, logprobs, parallel completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineGenerateError, RequestRefusedError
from vllm.v1.engine.logprobs import TokenTexts
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.request_state import RequestOutputCollector, RequestState
from vllm.v1.metrics.stats import IterationStats

logger = init_logger(__name__)


@dataclass
class OutputProcessorOutput:
    """request_outputs: of requests without a queue. reqs_to_abort: ids (of the engine) that have
    ended here, at a stop string, and go on there."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Keeps the state of every request that is under way. Not thread-safe."""

    def __init__(
        self, tokenizer: TokenizerLike | None, log_stats: bool = False, stream_interval: int = 1
    ) -> None:
        self.tokenizer = tokenizer
        self.log_stats = log_stats
        self.stream_interval = stream_interval
        self.request_states: dict[str, RequestState] = {}
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        # A client may use an id twice: each of its requests has ids of its own in the engine.
        self._ids_of_external: dict[str, set[str]] = {}
        self._parents: dict[str, ParentRequest] = {}
        self._all_finished = asyncio.Event()
        self._all_finished.set()

    def get_num_unfinished_requests(self) -> int:
        """Completions under way."""
        return len(self.request_states)

    def has_unfinished_requests(self) -> bool:
        """Whether any completion is under way."""
        return bool(self.request_states)

    async def wait_for_requests_to_drain(self) -> None:
        """Returns once no completion is under way."""
        await self._all_finished.wait()

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Expects outputs of `request` from now on. They go to `queue`, or else are returned by
        `process_outputs`.

        Raises:
            ValueError: a request of that id is under way.
        """
        if request.request_id in self.request_states:
            raise ValueError(f"a request with id {request.request_id} is under way already")
        state = RequestState.from_new_request(
            tokenizer=self.tokenizer,
            texts=self._texts,
            request=request,
            prompt=prompt,
            parent_req=parent_req,
            request_index=request_index,
            queue=queue,
            log_stats=self.log_stats,
            stream_interval=self.stream_interval,
        )
        self.request_states[request.request_id] = state
        self._ids_of_external.setdefault(state.external_req_id, set()).add(request.request_id)
        if parent_req is not None:
            self._parents[parent_req.request_id] = parent_req
        self._all_finished.clear()

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float = 0.0,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Takes in a step's outputs. Those of requests that have ended here are dropped."""
        result = OutputProcessorOutput()
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            if iteration_stats is not None and state.stats is not None:
                iteration_stats.update_from_output(output, engine_core_timestamp, state.stats)
            if output.finish_reason is FinishReason.ERROR:
                self._fail(state, output, iteration_stats, result)
            else:
                self._process_output(state, output, iteration_stats, result)
        return result

    def _process_output(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if output.prefill_stats is not None:
            state.num_cached_tokens = output.prefill_stats.num_cached_tokens
        state.kv_transfer_params = output.kv_transfer_params
        state.beam_score = output.beam_score
        stop_string = state.detokenizer.update(
            output.new_token_ids, finish_reason is FinishReason.STOP, finish_reason is not None
        )
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string
        state.logprobs_processor.update_from_output(output)
        self._hand_out(state.make_request_output(finish_reason, stop_reason), state, result)
        if finish_reason is not None:
            self._finish(state, finish_reason, iteration_stats)
            if not output.finished:
                result.reqs_to_abort.append(state.request_id)

    def _fail(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        iteration_stats: IterationStats | None,
        result: OutputProcessorOutput,
    ) -> None:
        """Ends a request that could not go on, and its siblings."""
        message = output.error_message or "the engine could not go on with this request"
        if state.parent_req is not None:
            siblings = sorted(state.parent_req.child_requests - {state.request_id})
            # Their own ends will not come, so this one ends the parent.
            state.parent_req.child_requests &= {state.request_id}
            result.reqs_to_abort.extend(siblings)
            for request_id in siblings:
                self._finish(self.request_states[request_id], FinishReason.ERROR, iteration_stats)
        if state.queue is not None:
            kind = EngineGenerateError if output.is_engine_fault else RequestRefusedError
            state.queue.put(kind(message))
        else:
            logger.warning("request %s failed: %s", state.external_req_id, message)
            self._hand_out(state.make_request_output(FinishReason.ERROR, None), state, result)
        self._finish(state, FinishReason.ERROR, iteration_stats)

    @staticmethod
    def _hand_out(
        output: RequestOutput | None, state: RequestState, result: OutputProcessorOutput
    ) -> None:
        if output is None:
            return
        if state.queue is not None:
            state.queue.put(output)
        else:
            result.request_outputs.append(output)

    def _finish(
        self,
        state: RequestState,
        finish_reason: FinishReason,
        iteration_stats: IterationStats | None,
    ) -> None:
        del self.request_states[state.request_id]
        ids = self._ids_of_external[state.external_req_id]
        ids.discard(state.request_id)
        if not ids:
            del self._ids_of_external[state.external_req_id]
        num_tokens, parent = state.detokenizer.num_output_tokens(), state.parent_req
        is_last = parent is None or parent.finish_child(state.request_id, num_tokens)
        if parent is not None and is_last:
            self._parents.pop(parent.request_id, None)
        if not self.request_states:
            self._all_finished.set()
        if iteration_stats is not None and is_last:
            longest = num_tokens if parent is None else parent.max_num_generation_tokens
            iteration_stats.n_params_iter.append(1 if parent is None else parent.n)
            iteration_stats.max_num_generation_tokens_iter.append(longest)
        if iteration_stats is not None and state.stats is not None:
            iteration_stats.update_from_finished_request(
                finish_reason=str(finish_reason),
                num_prompt_tokens=len(state.prompt_token_ids),
                max_tokens_param=state.max_tokens_param,
                request=state.stats,
            )

    def abort_requests(
        self,
        request_ids: Iterable[str],
        internal: bool = False,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        """Ends requests at their client's wish; unknown ids are ignored.

        Args:
            request_ids: of the client, or with `internal` of the engine (a parent's stands for
                those of its children).
        Returns:
            the ids to abort in the engine, and the last outputs of requests without a queue.
        """
        result = OutputProcessorOutput()
        for request_id in request_ids:
            for own_id in self._own_ids(request_id, internal):
                state = self.request_states.get(own_id)
                if state is None:
                    continue
                result.reqs_to_abort.append(own_id)
                state.detokenizer.update([], stop_terminated=False, finished=True)
                output = state.make_request_output(FinishReason.ABORT, None)
                self._hand_out(output, state, result)
                self._finish(state, FinishReason.ABORT, iteration_stats)
        return result

    def _own_ids(self, request_id: str, internal: bool) -> list[str]:
        if not internal:
            return sorted(self._ids_of_external.get(request_id, ()))
        parent = self._parents.get(request_id)
        return [request_id] if parent is None else sorted(parent.child_requests)

    def propagate_error(self, error: BaseException) -> None:
        """Ends every request with `error`: the engine is dead."""
        for state in list(self.request_states.values()):
            if state.queue is not None:
                state.queue.put(error)
        self.request_states.clear()
        self._ids_of_external.clear()
        self._parents.clear()
        self._all_finished.set()

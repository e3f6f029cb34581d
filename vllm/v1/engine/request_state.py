# SPDX-License-Identifier: Apache-2.0
"""What the front knows of a running request, and the queue its outputs go to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor, TokenTexts
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import RequestStateStats


class RequestOutputCollector:
    """Outputs of one request on their way to its consumer, without a bound and without a backlog:
    what the consumer did not fetch in time is merged."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._aggregate = output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Adds an output, or an error, which takes the place of outputs not fetched yet."""
        if isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            self._output.add(output, aggregate=self._aggregate)
        elif not isinstance(self._output, BaseException):
            self._output = output
            self._ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """What is there; None for nothing.

        Raises:
            BaseException: the error that was put.
        """
        output, self._output = self._output, None
        self._ready.clear()
        if isinstance(output, BaseException):
            raise output
        return output

    async def get(self) -> RequestOutput:
        """The next output; waits for it.

        Raises:
            BaseException: the error that was put.
        """
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output


@dataclass
class RequestState:
    """One completion that is under way; a request with n > 1 has one for each child."""

    request_id: str
    external_req_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    output_kind: RequestOutputKind
    max_tokens_param: int | None
    stream_interval: int
    detokenizer: IncrementalDetokenizer
    logprobs_processor: LogprobsProcessor
    parent_req: ParentRequest | None = None
    request_index: int = 0
    queue: RequestOutputCollector | None = None
    stats: RequestStateStats | None = None
    num_cached_tokens: int = 0
    num_sent_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    beam_score: float | None = None

    @classmethod
    def from_new_request(
        cls,
        tokenizer: TokenizerLike | None,
        texts: TokenTexts | None,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        request_index: int,
        queue: RequestOutputCollector | None,
        log_stats: bool,
        stream_interval: int,
    ) -> RequestState:
        """For a request that starts now."""
        params = request.sampling_params
        return cls(
            request_id=request.request_id,
            external_req_id=request.external_req_id or request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            output_kind=params.output_kind,
            max_tokens_param=params.max_tokens,
            stream_interval=params.stream_interval or stream_interval,
            detokenizer=IncrementalDetokenizer.from_new_request(tokenizer, request),
            logprobs_processor=LogprobsProcessor.from_new_request(tokenizer, texts, request),
            parent_req=parent_req,
            request_index=request_index,
            queue=queue,
            stats=RequestStateStats(arrival_time=request.arrival_time) if log_stats else None,
        )

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """The output to hand out now; None if its kind or its interval says to wait."""
        finished = finish_reason is not None
        if not finished and not self._is_due():
            return None
        completion = self._completion_output(finish_reason, stop_reason)
        completions = [completion]
        if self.parent_req is not None:
            completions, finished = self.parent_req.get_outputs(self.request_id, completion)
            if not completions:
                return None
        logprobs = self.logprobs_processor
        prompt_logprobs = logprobs.prompt_logprobs
        if self.output_kind is RequestOutputKind.DELTA:
            prompt_logprobs = logprobs.pop_prompt_logprobs()
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=finished,
            metrics=self.stats,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _is_due(self) -> bool:
        """The first tokens are due at once, then every `stream_interval`."""
        if self.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        num_unsent = len(self.detokenizer.token_ids) - self.num_sent_tokens
        return self.num_sent_tokens == 0 or num_unsent >= self.stream_interval

    def _completion_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        is_delta = self.output_kind is RequestOutputKind.DELTA
        begin = self.num_sent_tokens if is_delta else 0
        self.num_sent_tokens = len(self.detokenizer.token_ids)
        logprobs = self.logprobs_processor.logprobs
        return CompletionOutput(
            index=self.request_index,
            text=self.detokenizer.get_next_output_text(finish_reason is not None, is_delta),
            # A copy: the list goes on growing.
            token_ids=self.detokenizer.token_ids[begin:],
            cumulative_logprob=self.logprobs_processor.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[begin:],
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason,
            beam_score=self.beam_score,
        )

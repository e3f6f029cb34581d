# SPDX-License-Identifier: Apache-2.0
"""An engine that does what a test tells it to: for faults that a real engine shows only by chance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

from vllm.config import ModelConfig
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import cached_get_tokenizer

# Outputs of one request, told its prompt's ids and its parameters.
Script = Callable[[list[int], SamplingParams], AsyncGenerator[list[CompletionOutput], None]]


def piece(
    index: int, text: str, token_ids: list[int], finish_reason: str | None = None, logprob: bool = False
) -> CompletionOutput:
    """A piece of choice `index`."""
    logprobs = [{t: Logprob(-0.5, 1, text)} for t in token_ids] if logprob else None
    return CompletionOutput(index, text, token_ids, None, logprobs, finish_reason)


class FakeEngine:
    """Stands in for `AsyncLLM`. `running`: ids that were started and neither ended nor aborted."""

    encoder_decoder = None

    def __init__(self, script: Script, policy: str = "fcfs") -> None:
        self.model_config = ModelConfig(max_model_len=256)
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(policy=policy),
            shutdown_timeout=5,
        )
        self.script = script
        self.error: Exception | None = None
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.seen: list[tuple[str, dict, SamplingParams, int]] = []
        self._tokenizer = cached_get_tokenizer(self.model_config.tokenizer)

    @property
    def errored(self) -> bool:
        return self.error is not None

    @property
    def dead_error(self) -> BaseException:
        return self.error

    async def generate(self, prompt, sampling_params, request_id, *, priority=0):
        self.seen.append((request_id, prompt, sampling_params, priority))
        self.running.add(request_id)
        finished = False
        try:
            async for outputs in self.script(prompt["prompt_token_ids"], sampling_params):
                finished = all(output.finished() for output in outputs)
                yield RequestOutput(
                    request_id, prompt.get("prompt"), prompt["prompt_token_ids"], None, outputs,
                    finished,
                    # As a connector whose answer is the question.
                    kv_transfer_params=sampling_params.kv_transfer_params if finished else None,
                )  # fmt: skip
            finished = True
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.add(request_id)

    async def abort(self, request_id) -> None:
        self.aborted.add(request_id)

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False) -> bool:
        return reset_running_requests or not self.running

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    def get_tokenizer(self):
        return self._tokenizer

    def add_death_callback(self, callback) -> None:
        self.death_callback = callback

    def shutdown(self, timeout=None) -> None:
        pass


async def hello(token_ids: list[int], params: SamplingParams):
    """Says "hello" in two tokens, for each choice."""
    wants = params.logprobs is not None
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        yield [
            CompletionOutput(
                i, "hello", [5, 6], None,
                [{5: Logprob(-0.5, 1, "hel")}, {6: Logprob(float("-inf"), 2, "lo")}] if wants else None,
                "stop",
            )
            for i in range(params.n)
        ]  # fmt: skip
        return
    for i in range(params.n):
        yield [piece(i, "hel", [5], None, wants)]
        await asyncio.sleep(0)
        yield [piece(i, "lo", [6], "stop", wants)]


async def forever(token_ids: list[int], params: SamplingParams):
    """A token now and then, without end."""
    while True:
        yield [piece(0, "x", [5])]
        await asyncio.sleep(0.01)


async def never(token_ids: list[int], params: SamplingParams):
    """No output at all: as a request that waits in the queue."""
    await asyncio.Event().wait()
    yield []

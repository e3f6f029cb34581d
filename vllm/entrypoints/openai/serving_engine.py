# SPDX-License-Identifier: Apache-2.0
"""What the handlers of every generating route share: from a checked request to running ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import Request

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.protocol.common import GenerationRequest, RequestError
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.utils import random_uuid

logger = init_logger(__name__)

MAX_REQUEST_ID_CHARS = 128
# Texts shorter than this are tokenised where they are: a thread costs more.
_INLINE_CHARS = 4096
# Choices of one HTTP request, over all its prompts: each is a request of the engine.
MAX_CHOICES = 8192
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt ready for the engine; `text` where the client gave text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class Context:
    """Limits and defaults of the served model, read for each request since the engine may lower
    the length when it starts."""

    max_model_len: int
    vocab_size: int


class OpenAIServing:
    """The engine, the model's names, and the steps from prompt to engine request."""

    def __init__(self, engine_client: EngineClient, models: OpenAIServingModels) -> None:
        self.engine_client = engine_client
        self.models = models
        self.default_sampling_params = self._defaults()

    def _defaults(self) -> dict[str, Any]:
        """The model's own sampling defaults, so far as the server has them."""
        given = self.engine_client.model_config.get_diff_sampling_param()
        ignored = {
            name: value
            for name, value in given.items()
            if name not in _SAMPLING_DEFAULTS and not (name == "repetition_penalty" and value == 1)
        }
        if ignored:
            logger.warning_once(
                "sampling defaults of the model that are not supported have no effect: %s",
                ", ".join(f"{name}={value}" for name, value in ignored.items()),
            )
        return {name: given[name] for name in _SAMPLING_DEFAULTS if name in given}

    @property
    def context(self) -> Context:
        """The model's limits as they are now."""
        config = self.engine_client.model_config
        return Context(config.max_model_len, config.get_vocab_size())

    def check_request(self, request: GenerationRequest, num_prompts: int = 1) -> str:
        """Checks what needs no tokens; returns the model name to answer with.

        Raises:
            RequestError: unknown model, too many choices, or a priority that nobody heeds.
            EngineDeadError: the engine is dead.
        """
        if self.engine_client.errored:
            raise self.engine_client.dead_error
        name = self.models.model_name(request.model)
        choices = num_prompts * request.n
        if choices > MAX_CHOICES:
            raise RequestError(
                f"{num_prompts} prompts with n={request.n} make {choices} choices; one request may "
                f"ask for at most {MAX_CHOICES}",
                param="n" if num_prompts == 1 else "prompt",
            )
        policy = self.engine_client.vllm_config.scheduler_config.policy
        if request.priority and policy != "priority":
            raise RequestError(
                "priority has no effect on this server: it was not started with "
                "--scheduling-policy priority",
                param="priority",
            )
        return name

    # -- tokens --------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer.

        Raises:
            RequestError: the server has none.
        """
        if self.engine_client.model_config.skip_tokenizer_init:
            raise RequestError(
                "this server has no tokenizer (--skip-tokenizer-init): send token ids as prompt",
                param="prompt",
            )
        tokenizer = self.engine_client.get_tokenizer()
        assert tokenizer is not None
        return tokenizer

    @cached_property
    def _max_chars_per_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    async def tokenize(self, text: str, add_special_tokens: bool, param: str) -> EnginePrompt:
        """A text's token ids.

        Raises:
            RequestError: it has none, or surely more than the context.
        """
        tokenizer = self.tokenizer
        limit = self.context.max_model_len
        # A text of megabytes would keep a core busy only to be refused.
        if len(text) > limit and len(text) > limit * self._max_chars_per_token:
            raise RequestError(
                f"{param} is too long: {len(text)} characters are more than this model's maximum "
                f"context length of {limit} tokens can hold",
                param=param,
            )
        if len(text) < _INLINE_CHARS:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await asyncio.to_thread(
                tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        if not ids:
            message = f"{param} is empty: the tokenizer makes no tokens of it"
            raise RequestError(message, param=param)
        return EnginePrompt(ids, text)

    def check_token_ids(self, token_ids: list[int]) -> EnginePrompt:
        """A prompt of token ids.

        Raises:
            RequestError: an id the model does not have.
        """
        size = self.context.vocab_size
        wrong = next((t for t in (min(token_ids), max(token_ids)) if not 0 <= t < size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt holds the token id {wrong}, but the model has ids from 0 to {size - 1}",
                param="prompt",
            )
        return EnginePrompt(token_ids)

    def max_tokens(
        self, prompt: EnginePrompt, asked: int | None, param: str, is_default: bool = False
    ) -> int:
        """How many tokens to generate: what was asked for, or what is left of the context.

        Args:
            is_default: nobody asked for `asked`; it may be cut.

        Raises:
            RequestError: the prompt and what was asked for do not fit the context.
        """
        limit, length = self.context.max_model_len, len(prompt.token_ids)
        left = limit - length
        if left < 1:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {length} "
                "and leaves no room for an answer",
                param="messages" if param == "max_completion_tokens" else "prompt",
            )
        if asked is not None and asked > left and not is_default:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {length}, "
                f"so {param} can be at most {left}, not {asked}",
                param=param,
            )
        bounds = [left, asked, self.default_sampling_params.get("max_tokens")]
        return min(bound for bound in bounds if bound is not None)

    # -- engine requests -----------------------------------------------------------------------

    def request_id(self, prefix: str, raw_request: Request | None) -> str:
        """`prefix-` and the client's X-Request-Id, or one of our own.

        Raises:
            RequestError: the header is too long or not printable.
        """
        given = raw_request.headers.get("x-request-id") if raw_request is not None else None
        if not given:
            return f"{prefix}-{random_uuid()}"
        if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
            raise RequestError(
                f"X-Request-Id must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters",
                param="X-Request-Id",
            )
        return f"{prefix}-{given}"

    def sampling_params(
        self, request: GenerationRequest, max_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        """The request's sampling parameters, checked against the model.

        Raises:
            ValueError: a value out of range; the message begins with the field's name.
        """
        params = request.sampling_params(max_tokens, logprobs, self.default_sampling_params)
        params.verify(self.engine_client.model_config)
        return params

    def generate(
        self,
        request_id: str,
        prompt: EnginePrompt,
        params: SamplingParams,
        request: GenerationRequest,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Starts nothing yet: the engine gets the request when the generator is first asked."""
        engine_prompt = TokensPrompt(prompt_token_ids=prompt.token_ids)
        if prompt.text is not None:
            engine_prompt["prompt"] = prompt.text
        if request.cache_salt is not None:
            engine_prompt["cache_salt"] = request.cache_salt
        return self.engine_client.generate(
            engine_prompt, params, request_id, priority=request.priority
        )

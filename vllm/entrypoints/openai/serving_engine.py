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
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.encoder_prompts import EncoderPrompts
from vllm.entrypoints.openai.middleware import MAX_REQUEST_ID_CHARS
from vllm.entrypoints.openai.protocol.common import (
    GenerationRequest,
    RequestError,
    StreamOptions,
    UsageInfo,
)
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.openai.serving_prompt import EnginePrompt
from vllm.logger import init_logger
from vllm.multimodal.media.connector import MediaConnector
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.utils import random_uuid
from vllm.v1.engine.input_processor import truncate_prompt

logger = init_logger(__name__)

# Texts shorter than this are tokenised where they are: a thread costs more.
_INLINE_CHARS = 4096
# Choices of one HTTP request, over all its prompts: each is a request of the engine.
MAX_CHOICES = 8192
# Logprobs of one prompt and its choices: each takes some 100 bytes while the request runs.
MAX_LOGPROBS = 1 << 24
_SAMPLING_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "max_length", "min_length",
    "no_repeat_ngram_size", "forced_eos_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Context:
    """Limits and defaults of the served model, read for each request since the engine may lower
    the length when it starts."""

    max_model_len: int
    vocab_size: int


class OpenAIServing:
    """The engine, the model's names, and the steps from prompt to engine request."""

    def __init__(
        self,
        engine_client: EngineClient,
        models: OpenAIServingModels,
        args: FrontendArgs | None = None,
    ) -> None:
        self.engine_client = engine_client
        self.models = models
        self.args = args or FrontendArgs()
        self.default_sampling_params = self._defaults()
        self.encoder_prompts: EncoderPrompts | None = None
        if engine_client.encoder_decoder is not None:
            media = MediaConnector(engine_client.model_config.allowed_media_domains)
            self.encoder_prompts = EncoderPrompts(engine_client.encoder_decoder, media)

    def _defaults(self) -> dict[str, Any]:
        """The model's own sampling defaults, so far as the server has them."""
        given = self.engine_client.model_config.get_diff_sampling_param()
        ignored = {n: value for n, value in given.items() if n not in _SAMPLING_DEFAULTS}
        if ignored:
            logger.warning_once(
                "sampling defaults of the model that are not supported have no effect: %s",
                ", ".join(f"{name}={value}" for name, value in ignored.items()),
            )
        generation_config = self.engine_client.model_config.try_get_generation_config()
        beams = {name: generation_config.get(name) for name in ("length_penalty", "early_stopping")}
        return {
            **{name: value for name, value in beams.items() if value is not None},
            **{name: given[name] for name in _SAMPLING_DEFAULTS if name in given},
        }

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

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A text's token ids, whatever its length."""
        encode = self.tokenizer.encode
        if len(text) < _INLINE_CHARS:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def tokenize(
        self, text: str, add_special_tokens: bool, param: str, truncate_to: int | None = None
    ) -> EnginePrompt:
        """A text as a prompt; of its tokens the last `truncate_to` (see `truncate_prompt`).

        Raises:
            RequestError: it has none, or surely more than the context.
        """
        limit = self.context.max_model_len
        # A text of megabytes would keep a core busy only to be refused.
        is_long = len(text) > limit and len(text) > limit * self._max_chars_per_token
        if is_long and truncate_to is None:
            raise RequestError(
                f"{param} is too long: {len(text)} characters are more than this model's maximum "
                f"context length of {limit} tokens can hold",
                param=param,
            )
        ids = await self.encode(text, add_special_tokens)
        if not ids:
            message = f"{param} is empty: the tokenizer makes no tokens of it"
            raise RequestError(message, param=param)
        # Tokens may have been added to a tokenizer that the model has no rows for.
        kept = self.check_token_ids(ids, truncate_to, param).token_ids
        return EnginePrompt(kept, text if len(kept) == len(ids) else None)

    def check_token_ids(
        self, token_ids: list[int], truncate_to: int | None = None, param: str = "prompt"
    ) -> EnginePrompt:
        """A prompt of token ids, or of the last `truncate_to` of them.

        Raises:
            RequestError: an id the model does not have.
        """
        size = self.context.vocab_size
        wrong = next((t for t in (min(token_ids), max(token_ids)) if not 0 <= t < size), None)
        if wrong is not None:
            raise RequestError(
                f"{param} holds the token id {wrong}, but the model has ids from 0 to {size - 1}",
                param=param,
            )
        return EnginePrompt(truncate_prompt(token_ids, truncate_to, self.context.max_model_len))

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

    def request_id(
        self, prefix: str, raw_request: Request | None, request: GenerationRequest
    ) -> str:
        """`prefix-` and the client's X-Request-Id, or its field `request_id`, or one of our own.

        Raises:
            RequestError: it is too long or not printable.
        """
        given = raw_request.headers.get("x-request-id") if raw_request is not None else None
        param = "X-Request-Id" if given else "request_id"
        given = given or request.request_id
        if not given:
            return f"{prefix}-{random_uuid()}"
        if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
            raise RequestError(
                f"{param} must be at most {MAX_REQUEST_ID_CHARS} printable ASCII characters",
                param=param,
            )
        return f"{prefix}-{given}"

    def sampling_params(
        self,
        request: GenerationRequest,
        prompt: EnginePrompt,
        max_tokens: int,
        logprobs: int | None,
    ) -> SamplingParams:
        """The request's sampling parameters, checked against the model.

        Raises:
            ValueError: a value out of range; the message begins with the field's name.
        """
        params = request.sampling_params(max_tokens, logprobs, self.default_sampling_params)
        params.verify(self.engine_client.model_config)
        self._bound_logprobs(params, len(prompt.token_ids))
        return params

    def _bound_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        def entries(wanted: int | None, positions: int) -> int:
            if wanted is None:
                return 0
            return positions * (1 + (self.context.vocab_size if wanted == -1 else wanted))

        of_output = entries(params.num_logprobs, params.n * (params.max_tokens or 0))
        of_prompt = entries(params.prompt_logprobs, params.n * num_prompt_tokens)
        if of_output + of_prompt > MAX_LOGPROBS:
            name = "logprobs" if of_output >= of_prompt else "prompt_logprobs"
            raise RequestError(
                f"{name}: {of_output + of_prompt} logprobs are more than the {MAX_LOGPROBS} that "
                "one request may ask for: ask for fewer at each position, for fewer tokens, or for "
                "a smaller n",
                param=name,
            )

    # -- answers -------------------------------------------------------------------------------

    def stream_options(self, request: GenerationRequest) -> StreamOptions:
        """What a stream has besides its pieces."""
        options = request.stream_options or StreamOptions()
        if self.args.enable_force_include_usage:
            options = options.model_copy(update={"include_usage": True})
        return options

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> UsageInfo:
        """The numbers as an answer tells them."""
        details = cached_tokens if self.args.enable_prompt_tokens_details else None
        return UsageInfo.of(prompt_tokens, completion_tokens, details)

    def shows_token_ids(self, request: GenerationRequest) -> bool:
        """Whether logprobs name tokens as `token_id:5` rather than by their text."""
        asked = request.return_tokens_as_token_ids
        return self.args.return_tokens_as_token_ids if asked is None else asked

    def generate(
        self,
        request_id: str,
        prompt: EnginePrompt,
        params: SamplingParams,
        request: GenerationRequest,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Starts nothing yet: the engine gets the request when the generator is first asked."""
        return self.engine_client.generate(
            prompt.for_engine(request.cache_salt), params, request_id, priority=request.priority
        )

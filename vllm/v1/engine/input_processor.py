# SPDX-License-Identifier: Apache-2.0
"""A user's prompt and parameters to an `EngineCoreRequest`, or to a ValueError that says what is
wrong with them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.inputs import EngineInput, PromptType, tokens_input
from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
from vllm.inputs.parse import (
    ParsedPrompt,
    is_processed,
    parse_decoder_only_prompt,
    parse_encoder_decoder_prompt,
)
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike, cached_get_tokenizer
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.sample.logits_processor import (
    load_custom_logitsprocs,
    validate_logits_processors_parameters,
)

logger = init_logger(__name__)

_TOKENIZATION_OPTIONS = (
    "add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens",
)  # fmt: skip


def truncate_prompt(
    token_ids: list[int], truncate_prompt_tokens: int | None, max_model_len: int
) -> list[int]:
    """The last `truncate_prompt_tokens` of a prompt; None: all of it; -1: as many as leave room for
    a token of output.

    Raises:
        ValueError: another number, or one that the model's context does not hold.
    """
    if truncate_prompt_tokens is None:
        return token_ids
    wanted = max_model_len - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if type(wanted) is not int or not 1 <= wanted <= max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens must be -1 or from 1 to the {max_model_len} tokens of the "
            f"model's context, not {truncate_prompt_tokens!r}"
        )
    return token_ids[-wanted:]


def split_request(
    request: EngineCoreRequest,
) -> Iterator[tuple[EngineCoreRequest, ParentRequest | None, int]]:
    """The completions of `request`, with their parent and index: `request` itself, or a child for
    each of its n completions. `is_for_engine_core` says which of them are sent."""
    if request.sampling_params.n == 1:
        yield request, None, 0
        return
    parent = ParentRequest(request)
    # All are known before the first can end.
    children = [parent.get_child_info(index) for index in range(parent.n)]
    for index, (child_id, params) in enumerate(children):
        child = copy.copy(request)
        child.request_id = child_id
        child.sampling_params = params
        child.external_req_id = parent.external_req_id
        yield child, parent, index


def is_for_engine_core(child: EngineCoreRequest, index: int) -> bool:
    """Whether the engine core is to get it: the first sequence of a beam search stands for all."""
    return index == 0 or child.sampling_params.beam_search is None


@dataclass(frozen=True)
class _Processed:
    """A prompt as the engine takes it; `text` for the record."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None
    engine_input: EngineInput
    mm_features: list[MultiModalFeatureSpec] | None = None


class InputProcessor:
    """Tokenises, checks, and fills in what a request leaves to the model. Thread-safe."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.generation_config = self.model_config.try_get_generation_config()
        self.tokenizer = None if self.model_config.skip_tokenizer_init else self._load_tokenizer()
        self._logits_processors = load_custom_logitsprocs(self.model_config.logits_processors)
        self.encoder_decoder: EncoderDecoderPreprocessor | None = None
        if self.model_config.is_encoder_decoder:
            self.encoder_decoder = EncoderDecoderPreprocessor(self.model_config, self.tokenizer)

    def _load_tokenizer(self) -> TokenizerLike:
        config = self.model_config
        return cached_get_tokenizer(
            config.tokenizer,
            tokenizer_mode=config.tokenizer_mode,
            trust_remote_code=config.trust_remote_code,
            revision=config.tokenizer_revision,
            download_dir=self.vllm_config.load_config.download_dir,
        )

    def get_tokenizer(self) -> TokenizerLike:
        """The model's tokenizer.

        Raises:
            ValueError: the engine was started without one.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine has skip_tokenizer_init")
        return self.tokenizer

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends an output: the tokenizer's, or the first that the config names."""
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return self.tokenizer.eos_token_id
        named = self.model_config.hf_text_config_dict.get("eos_token_id")
        return (named[0] if named else None) if isinstance(named, list) else named

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> tuple[EngineCoreRequest, str | None]:
        """The request as the engine core takes it, and the prompt's text if it has one.

        `tokenization_kwargs` may be add_special_tokens, truncation, max_length and
        truncate_prompt_tokens (which counts more than that of `params`).

        The id in the engine is made unique: `request_id` goes on as `external_req_id`.

        Raises:
            ValueError: prompt or parameters cannot be served; the message is for the user.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"only generation is supported: pass SamplingParams, not {type(params).__name__}"
            )
        transfer = self.vllm_config.kv_transfer_config
        if params.kv_transfer_params is not None and (transfer is None or not transfer.kv_connector):
            raise ValueError(
                "kv_transfer_params: this engine has no KV connector (--kv-transfer-config)"
            )
        options = dict(tokenization_kwargs or {})
        truncate_to = options.pop("truncate_prompt_tokens", params.truncate_prompt_tokens)
        self._check_tokenization_options(options)
        if self.encoder_decoder is None:
            processed = self._process_decoder_only(prompt, truncate_to, options)
        else:
            processed = self._process_encoder_decoder(prompt, truncate_to, options)
        self._validate_length(len(processed.token_ids))
        request = EngineCoreRequest(
            request_id=f"{request_id}-{random_uuid()[:8]}",
            prompt_token_ids=processed.token_ids,
            sampling_params=self._complete_params(params, len(processed.token_ids)),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=processed.cache_salt,
            priority=priority,
            trace_headers=trace_headers,
            external_req_id=request_id,
            mm_features=processed.mm_features,
        )
        current_platform.validate_request(processed.engine_input, request.sampling_params)
        return request, processed.text

    def _process_decoder_only(
        self, prompt: PromptType, truncate_to: int | None, options: dict[str, Any]
    ) -> _Processed:
        parsed = parse_decoder_only_prompt(prompt)
        token_ids = self._token_ids(parsed, options)
        token_ids = truncate_prompt(token_ids, truncate_to, self.model_config.max_model_len)
        engine_input = tokens_input(token_ids)
        return _Processed(token_ids, parsed.text, parsed.cache_salt, engine_input)

    def _process_encoder_decoder(
        self, prompt: PromptType, truncate_to: int | None, options: dict[str, Any]
    ) -> _Processed:
        if truncate_to is not None:
            raise ValueError(
                "truncate_prompt_tokens is not supported by encoder-decoder models, whose prompts "
                "lose their meaning without a beginning; tokenization_kwargs of truncation and "
                "max_length cut the end of the encoder's text"
            )
        assert self.encoder_decoder is not None
        text: str | None = None
        if is_processed(prompt):
            engine_input = prompt
        else:
            parsed = parse_encoder_decoder_prompt(prompt)
            text = parsed.text if isinstance(parsed, ParsedPrompt) else None
            engine_input = self.encoder_decoder.process(parsed, options)
        decoder = engine_input["decoder_prompt"]
        token_ids = decoder["prompt_token_ids"]
        self._validate_token_ids(token_ids)
        text = decoder.get("prompt") if text is None else text
        features = self.encoder_decoder.features(engine_input)
        salt = decoder.get("cache_salt")
        return _Processed(token_ids, text, salt, engine_input, features)

    def _check_tokenization_options(self, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - set(_TOKENIZATION_OPTIONS))
        if unknown:
            raise ValueError(
                f"tokenization option {unknown[0]!r} is not supported; supported: "
                f"{', '.join(_TOKENIZATION_OPTIONS)}"
            )

    def _token_ids(self, prompt: ParsedPrompt, options: dict[str, Any]) -> list[int]:
        if prompt.token_ids is not None:
            self._validate_token_ids(prompt.token_ids)
            return prompt.token_ids
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer, and the engine was started with "
                "skip_tokenizer_init: pass prompt_token_ids"
            )
        if not prompt.text:
            raise ValueError("the prompt is empty")
        token_ids = self.tokenizer.encode(prompt.text, **options)
        if not token_ids:
            raise ValueError("the prompt is empty: the tokenizer makes no tokens of it")
        # Tokens may have been added to a tokenizer that the model has no rows for.
        self._validate_token_ids(token_ids)
        return token_ids

    def _validate_token_ids(self, token_ids: Any) -> None:
        if not isinstance(token_ids, list) or any(type(t) is not int for t in token_ids):
            raise ValueError("prompt token ids must be a list of integers")
        if not token_ids:
            raise ValueError("the prompt is empty")
        vocab_size = self.model_config.get_vocab_size()
        worst = next((t for t in (min(token_ids), max(token_ids)) if not 0 <= t < vocab_size), None)
        if worst is not None:
            raise ValueError(
                f"prompt token id {worst} is out of range: the model has 0 to {vocab_size - 1}"
            )

    def _validate_length(self, num_tokens: int) -> None:
        max_model_len = self.model_config.max_model_len
        if num_tokens > max_model_len:
            raise ValueError(
                f"the prompt is too long: {num_tokens} tokens, and this model's maximum context "
                f"length is {max_model_len} tokens (prompt and output together)"
            )
        if num_tokens == max_model_len:
            raise ValueError(
                f"the prompt's {num_tokens} tokens fill this model's maximum context length of "
                f"{max_model_len} tokens and leave no room for an output token"
            )

    def _complete_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy with what the request leaves to the model and the tokenizer."""
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; pass stop_token_ids")
        params.verify(self.model_config)
        if self._logits_processors:
            validate_logits_processors_parameters(self._logits_processors, params)
        params = params.clone()
        params.resolve_lengths(num_prompt_tokens, self.model_config.max_model_len)
        params.update_from_generation_config(self.generation_config, self.eos_token_id)
        if self.tokenizer is not None:
            params.update_from_tokenizer(self.tokenizer)
        return params

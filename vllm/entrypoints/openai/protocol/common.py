# SPDX-License-Identifier: Apache-2.0
"""What requests and responses of every route share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from vllm.logger import init_logger
from vllm.sampling_params import (
    MAX_BEAM_WIDTH,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    logit_bias_by_id,
)

logger = init_logger(__name__)

# What travels to the engine is msgpack, whose integers have 64 bits.
def _no_bool(value: Any) -> Any:
    """`value`, unless it is true or false, which Python takes for 1 and 0.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_no_bool)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
_NOT_WITH_BEAMS = ("stream", "stop", "prompt_logprobs", "logprob_token_ids", "kv_transfer_params")
DEFAULT_TEMPERATURE, DEFAULT_TOP_P, DEFAULT_TOP_K, DEFAULT_MIN_P = 1.0, 1.0, 0, 0.0


class RequestError(ValueError):
    """A request that cannot be served as it is; becomes an error response.

    Args:
        param: the field at fault.
        status: HTTP status.
        type: the error's kind, in OpenAI's and upstream's terms.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        type: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.type = type


def valid_text(text: str) -> str:
    """`text`, if UTF-8 can say it: JSON can name half of a surrogate pair, which nothing takes.

    Raises:
        ValueError: it cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(valid_text)]
# What a logits processor may be told by a request.
_XArgItem = Text | Int64 | float
XArg = _XArgItem | list[_XArgItem]


class ErrorInfo(BaseModel):
    """What went wrong; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    """The body of every response that is an error."""

    error: ErrorInfo


class PromptTokenUsageInfo(BaseModel):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int | None = None


class UsageInfo(BaseModel):
    """Tokens of a request, over all its prompts and choices. `prompt_tokens_details` only with
    --enable-prompt-tokens-details."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None

    @classmethod
    def of(
        cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
    ) -> UsageInfo:
        """The two numbers and their sum; `cached_tokens` None: no details."""
        details = None
        if cached_tokens is not None:
            details = PromptTokenUsageInfo(cached_tokens=cached_tokens)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
        )


class ModelCard(BaseModel):
    """A name that the model is served under."""

    id: str
    object: str = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """The answer of `/v1/models`."""

    object: str = "list"
    data: list[ModelCard] = Field(default_factory=list)


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RequestFields(BaseModel):
    """The fields of any request.

    Fields that OpenAI or upstream know and this server does not are refused where they are given
    anything but their default (`REFUSED`); other unknown fields are ignored, as upstream does,
    since clients send many.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    # Field -> values that change nothing. None never does.
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def _refuse_what_is_not_built(self) -> RequestFields:
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in self.REFUSED and value is not None and value not in self.REFUSED[name]:
                raise RequestError(f"{name} is not supported by this server", param=name)
        ignored = sorted(extra.keys() - self.REFUSED.keys())
        if ignored:
            logger.debug("fields of a request were ignored: %s", ", ".join(ignored)[:500])
        return self


class GenerationRequest(RequestFields):
    """The fields of a request for text, whatever its prompt looks like."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "logits_processors": ([],),
        "thinking_token_budget": (),
        "repetition_detection": (),
        "lora_request": (),
        "ec_transfer_params": (),
        "mm_processor_kwargs": ({},),
        "best_of": (1,),
        "data_parallel_rank": (),
        # Of prompts and models with an encoder, in LLM; over HTTP the prompt is the encoder's.
        "encoder_prompt": (),
        "decoder_prompt": (),
        "multi_modal_data": ({},),
        "multi_modal_uuids": ({},),
        "max_length": (),
        "min_length": (0,),
        "no_repeat_ngram_size": (0,),
        "forced_eos_token_id": (),
        "num_beams": (1,),
    }

    model: str | None = None
    n: Int64 = 1
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int32 | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: dict[str, Float] | None = None
    allowed_token_ids: list[Int32] | None = None
    bad_words: list[Text] | None = None
    seed: Int64 | None = None
    use_beam_search: bool = False
    length_penalty: Float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Int32] | None = None
    min_tokens: Int64 = Field(default=0, ge=0)
    ignore_eos: bool = False
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: list[Int32] | None = None
    truncate_prompt_tokens: Int64 | None = None
    echo: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int64 = 0
    cache_salt: Text | None = Field(default=None, min_length=1, max_length=1024)
    request_id: Text | None = None
    user: str | None = None
    vllm_xargs: dict[Text, XArg] | None = None
    kv_transfer_params: dict[Text, Any] | None = None

    @field_validator("kv_transfer_params")
    @classmethod
    def _check_kv_transfer_params(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            msgspec.msgpack.encode(value)
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"kv_transfer_params cannot be passed on: {error}", param="kv_transfer_params"
            ) from None
        return value or None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _check_beam_search(self) -> GenerationRequest:
        if not self.use_beam_search:
            neutral = {"length_penalty": (None, 1.0), "early_stopping": (None, False)}
            for name, values in neutral.items():
                if getattr(self, name) not in values:
                    raise RequestError(f"{name} needs use_beam_search=true", param=name)
            return self
        if not 1 <= self.n <= MAX_BEAM_WIDTH:
            message = f"with use_beam_search, n is the number of beams: 1 to {MAX_BEAM_WIDTH}"
            raise RequestError(message, param="n")
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) not in (None, False, [], ""):
                message = f"{name} is not available with use_beam_search=true"
                raise RequestError(message, param=name)
        drawing = sorted({"temperature", "top_p", "top_k", "min_p", "seed"} & self.model_fields_set)
        if drawing:
            logger.warning_once(
                "a beam search draws nothing: %s of a request had no effect", ", ".join(drawing)
            )
        return self

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """The request in the engine's terms.

        Args:
            max_tokens: what the request asks for and the context allows.
            logprobs: most likely tokens to report at each position; None: none.
            defaults: the model's own defaults, by name of a sampling parameter.

        Raises:
            ValueError: a value out of range; the message begins with the field's name.
        """

        def chosen(value: Any, name: str, default: Any) -> Any:
            return value if value is not None else defaults.get(name, default)

        given = self.model_fields_set
        min_tokens = self.min_tokens
        if "min_tokens" not in given:
            min_tokens = min(defaults.get("min_tokens", 0), max_tokens)
        asks_length = given & {"max_tokens", "max_completion_tokens"}
        params = SamplingParams(
            # Of a beam search the number of beams.
            n=1 if self.use_beam_search else self.n,
            temperature=chosen(self.temperature, "temperature", DEFAULT_TEMPERATURE),
            top_p=chosen(self.top_p, "top_p", DEFAULT_TOP_P),
            top_k=chosen(self.top_k, "top_k", DEFAULT_TOP_K),
            min_p=chosen(self.min_p, "min_p", DEFAULT_MIN_P),
            presence_penalty=chosen(self.presence_penalty, "presence_penalty", 0.0),
            frequency_penalty=chosen(self.frequency_penalty, "frequency_penalty", 0.0),
            repetition_penalty=chosen(self.repetition_penalty, "repetition_penalty", 1.0),
            logit_bias=logit_bias_by_id(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=self._wanted_prompt_logprobs(logprobs),
            logprob_token_ids=self.logprob_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            extra_args=self._extra_args(),
            no_repeat_ngram_size=defaults.get("no_repeat_ngram_size", 0),
            forced_eos_token_id=defaults.get("forced_eos_token_id"),
            bad_words_token_ids=defaults.get("bad_words_token_ids"),
            max_length=None if asks_length else defaults.get("max_length"),
            min_length=None if "min_tokens" in given else defaults.get("min_length"),
        )
        if not self.use_beam_search:
            return params
        beams = BeamSearchParams(
            beam_width=self.n,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=chosen(self.length_penalty, "length_penalty", 1.0),
            include_stop_str_in_output=self.include_stop_str_in_output,
            early_stopping=chosen(self.early_stopping, "early_stopping", False),
        )
        return params.for_beam_search(beams)

    def _extra_args(self) -> dict[str, Any] | None:
        if self.kv_transfer_params is None:
            return self.vllm_xargs
        return {**(self.vllm_xargs or {}), "kv_transfer_params": self.kv_transfer_params}

    def _wanted_prompt_logprobs(self, logprobs: int | None) -> int | None:
        return self.prompt_logprobs

# SPDX-License-Identifier: Apache-2.0
"""What a request asks of sampling and of its output."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.tokenizers import TokenizerLike

logger = init_logger(__name__)

# Below this a temperature is taken for greedy: logits divided by it overflow.
_MIN_TEMPERATURE = 1e-2
_GREEDY_BELOW = 1e-5
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
# Each step weighs 2 * width * width candidates.
MAX_BEAM_WIDTH = 256


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """CUMULATIVE: each output holds all so far; DELTA: what is new; FINAL_ONLY: one at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class BeamSearchParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Beam search of one request, in the terms of Transformers' `generate(num_beams=beam_width)`.

    beam_width: beams that are followed, and sequences that are given back. 1 is greedy decoding.
    max_tokens: the most tokens of a sequence; the model's length bounds it too.
    ignore_eos: an end-of-sequence token is a token like any other.
    temperature: without effect, as scores are sums of logprobs; for upstream's sake.
    length_penalty: a sequence's score is the sum of its logprobs divided by its length to the power
        of this: above 0 long sequences are preferred, below 0 short ones.
    include_stop_str_in_output: the text shows the token that ended it.
    early_stopping: when to stop while beams are running, though `beam_width` sequences have ended.
        True: at once; False: when no running beam is better than the worst of them; "never": when
        none can become better.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _require_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _require_int("max_tokens", self.max_tokens, 1)
        _require("temperature", self.temperature, 0.0, 2.0e3)
        # Further out, a sequence's length to the power of it is no number any more.
        _require("length_penalty", self.length_penalty, -10.0, 10.0)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}'
            )


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Sampling parameters of one request, in the terms of the OpenAI API.

    logprobs, prompt_logprobs: likeliest tokens to report at each position; -1: all.
    logprob_token_ids: tokens to report at each output position in place of the likeliest.
    flat_logprobs: give logprobs as `FlatLogprobs` rather than as dicts.
    truncate_prompt_tokens: keep only the last so many tokens of the prompt; -1: as many as the
        model takes.
    extra_args: for logits processors that are not built in; `kv_transfer_params` in them are for a
        KV connector.
    beam_search: follow `n` beams rather than draw.
    no_repeat_ngram_size: so many tokens in a row come at most once in prompt and output; 0: any
        number of times. Of an encoder-decoder model the prompt is the decoder's.
    forced_eos_token_id: what an output that reaches `max_tokens` ends with, one of these if there
        are several; no effect with `ignore_eos`.
    max_length, min_length: as `max_tokens` (the smaller counts) and `min_tokens` (the larger), but
        with the tokens of the prompt, as Transformers counts; an encoder-decoder model's is the
        decoder's.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None

    # Set by `update_from_generation_config` and `update_from_tokenizer`; they travel with the rest.
    eos_token_id: int | None = None
    all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    bad_words_token_ids: list[list[int]] | None = None

    # Set by `for_beam_search`.
    beam_search: BeamSearchParams | None = None

    no_repeat_ngram_size: int = 0
    forced_eos_token_id: int | list[int] | None = None
    max_length: int | None = None
    min_length: int | None = None

    @staticmethod
    def from_optional(**values: Any) -> SamplingParams:
        """As the constructor, but None takes a field's default. `logit_bias` keys may be strings.

        Raises:
            ValueError: a value out of range, or a `logit_bias` key that is no token id.
        """
        keeps_none = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
        given = {k: v for k, v in values.items() if v is not None or k in keeps_none}
        if given.get("logit_bias"):
            given["logit_bias"] = logit_bias_by_id(given["logit_bias"])
        return SamplingParams(**given)

    def __post_init__(self) -> None:
        self.seed = None if self.seed == -1 else self.seed
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        self._verify_kinds()
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        _require("temperature", self.temperature, 0.0, 2.0e3)
        if _GREEDY_BELOW <= self.temperature < _MIN_TEMPERATURE:
            logger.warning_once(
                "temperature %s is too small to divide by; %s is used", self.temperature,
                _MIN_TEMPERATURE,
            )  # fmt: skip
            self.temperature = _MIN_TEMPERATURE
        self._verify_args()
        if self.temperature < _GREEDY_BELOW:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        if self.stop and not self.include_stop_str_in_output:
            # The longest stop string but one character can still become a stop: hold it back.
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        self.all_stop_token_ids = set(self.all_stop_token_ids) | set(self.stop_token_ids)

    def _verify_args(self) -> None:
        _require_int("n", self.n, 1, envs.VLLM_MAX_N_SEQUENCES)
        if self.beam_search is None and self.n > 1 and self.temperature < _GREEDY_BELOW:
            raise ValueError(f"n must be 1 with greedy sampling (temperature 0), not {self.n}")
        if self.n > 1 and self.kv_transfer_params is not None:
            raise ValueError(f"n must be 1 with kv_transfer_params, not {self.n}")
        _require("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Further out, logits divided by it are no numbers any more.
        _require("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _require("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_int("top_k", self.top_k, -1)
        self.top_k = max(self.top_k, 0)
        _require("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1)
        _require_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        _require_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        for name, least in (("max_length", 1), ("min_length", 0)):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), least)
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value, -1)
        if self.truncate_prompt_tokens is not None:
            _require_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be -1 or at least 1, not 0")
        self._verify_stop()
        self._verify_token_choices()

    def _verify_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError("stop must hold non-empty strings")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; stop_token_ids do not")
        if any(not isinstance(t, int) or isinstance(t, bool) for t in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must hold integers, not {self.stop_token_ids}")

    def _verify_kinds(self) -> None:
        for name in (
            "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens",
            "spaces_between_special_tokens", "include_stop_str_in_output",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise ValueError(f"extra_args must be a dict, not {type(self.extra_args).__name__}")
        params = self.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            raise ValueError(f"kv_transfer_params must be a dict, not {type(params).__name__}")

    def _verify_token_choices(self) -> None:
        if type(self.forced_eos_token_id) is int:
            self.forced_eos_token_id = [self.forced_eos_token_id]
        for name in ("allowed_token_ids", "logprob_token_ids", "forced_eos_token_id"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, list) or any(type(token) is not int for token in ids):
                raise ValueError(f"{name} must be a list of token ids, not {ids!r:.100}")
            if not ids:
                raise ValueError(f"{name} is empty: name a token, or leave it out")
            setattr(self, name, list(dict.fromkeys(ids)))
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(
                f"logprob_token_ids holds {len(self.logprob_token_ids)} token ids; at most "
                f"{MAX_LOGPROB_TOKEN_IDS}"
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words holds {len(self.bad_words)} words; at most {MAX_BAD_WORDS}")
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words):
            raise ValueError("bad_words must hold words: texts that are not empty")
        for ids in self.bad_words_token_ids or ():
            if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
                raise ValueError(f"bad_words_token_ids must hold lists of token ids, not {ids!r:.100}")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or not isinstance(bias, (int, float)) or bias != bias:
                raise ValueError(f"logit_bias must map token ids to numbers, not {token!r}: {bias!r}")

    def for_beam_search(self, beams: BeamSearchParams) -> SamplingParams:
        """Beam search with what these parameters say about tokens: those that are forbidden, biased,
        penalised, and those that end a sequence. What they say about drawing has no effect. One
        beam is greedy decoding.

        Raises:
            ValueError: stop strings, `prompt_logprobs` or `logprob_token_ids`.
        """
        for name in ("stop", "prompt_logprobs", "logprob_token_ids"):
            if getattr(self, name) not in (None, []):
                raise ValueError(f"{name} is not supported with beam search")
        return msgspec.structs.replace(
            self,
            n=beams.beam_width,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=None,
            max_tokens=beams.max_tokens,
            min_tokens=min(self.min_tokens, beams.max_tokens),
            max_length=None,
            ignore_eos=beams.ignore_eos,
            include_stop_str_in_output=beams.include_stop_str_in_output,
            beam_search=beams if beams.beam_width > 1 else None,
        )

    def resolve_lengths(self, num_prompt_tokens: int, max_model_len: int) -> None:
        """Turns what counts the prompt, or was left to the model, into `max_tokens` and
        `min_tokens`.

        Raises:
            ValueError: `max_length` leaves no room for a token, or the context none for
                `min_tokens`.
        """
        room = max_model_len - num_prompt_tokens
        if self.max_length is not None:
            if self.max_length <= num_prompt_tokens:
                raise ValueError(
                    f"the (decoder) prompt's {num_prompt_tokens} tokens leave no room within "
                    f"max_length ({self.max_length}); pass max_tokens, or a larger max_length"
                )
            room = min(room, self.max_length - num_prompt_tokens)
            self.max_tokens = min(self.max_tokens or room, room)
        if self.max_tokens is None:
            self.max_tokens = room
            if self.min_tokens > room:
                raise ValueError(
                    f"min_tokens ({self.min_tokens}) must be at most the {room} tokens that the "
                    "prompt leaves of the model's context"
                )
        if self.min_length is not None:
            self.min_tokens = max(self.min_tokens, self.min_length - num_prompt_tokens)
        self.min_tokens = min(self.min_tokens, self.max_tokens)

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Takes over the end-of-sequence ids: the tokenizer's `eos_token_id` and the further ones
        of the model's generation_config."""
        self.eos_token_id = eos_token_id
        configured = generation_config.get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        further = {token for token in ids if token is not None and token != eos_token_id}
        if not self.ignore_eos:
            self.stop_token_ids = sorted({*self.stop_token_ids, *further})
            self.all_stop_token_ids |= further
        if eos_token_id is not None:
            self.all_stop_token_ids.add(eos_token_id)

    def update_from_tokenizer(self, tokenizer: TokenizerLike) -> None:
        """Turns `bad_words` into token ids, as they look at a text's start and after a space.

        Raises:
            ValueError: a word that the tokenizer makes no tokens of.
        """
        if not self.bad_words:
            return
        banned = list(self.bad_words_token_ids or [])  # What the model's own config forbids.
        for word in self.bad_words:
            plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise ValueError(f"bad_words holds {word!r}, of which the tokenizer makes no tokens")
            banned.append(plain)
            # Where a space is a token of its own, `plain` is found after it anyway.
            if spaced[-len(plain) :] != plain:
                banned.append(spaced)
        self.bad_words_token_ids = [
            ids for place, ids in enumerate(banned) if ids not in banned[:place]
        ]

    @cached_property
    def sampling_type(self) -> SamplingType:
        """How a token is drawn."""
        if self.temperature < _GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """Logprobs wanted at each output position besides the token's own; -1: the whole
        vocabulary."""
        if self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What a KV connector must know of the request."""
        return (self.extra_args or {}).get("kv_transfer_params")

    def clone(self) -> SamplingParams:
        """A copy that may be changed. With `skip_clone`, this object itself."""
        return self if self.skip_clone else copy.deepcopy(self)

    def verify(self, model_config: ModelConfig) -> None:
        """Checks what only the model can tell.

        Raises:
            ValueError: too many logprobs, or a token id the model does not have.
        """
        vocab_size = model_config.get_vocab_size()
        limit = model_config.max_logprobs
        limit = vocab_size if limit == -1 else limit
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            wanted = vocab_size if wanted == -1 else wanted
            if wanted is not None and wanted > limit:
                raise ValueError(
                    f"{name} ({wanted}) is more than this server allows: at most {limit} "
                    "(--max-logprobs)"
                )
        for name in (
            "stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids",
            "forced_eos_token_id",
        ):  # fmt: skip
            _require_known_tokens(name, getattr(self, name) or (), vocab_size)
        banned = itertools.chain.from_iterable(self.bad_words_token_ids or ())
        _require_known_tokens("bad_words_token_ids", banned, vocab_size)

    @staticmethod
    def for_sampler_warmup() -> SamplingParams:
        """Uses every step of the sampler."""
        return SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.1, logprobs=1)


def _require(
    name: str, value: Any, low: float, high: float, low_open: bool = False
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (low_open and value == low):
        interval = f"{'(' if low_open else '['}{low}, {high}]"
        raise ValueError(f"{name} must be in {interval}, not {value!r}")


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {wanted}, not {value!r}")


def _require_known_tokens(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"{name} holds token ids the model does not have: {unknown[:5]}; it has 0 to "
            f"{vocab_size - 1}"
        )


def logit_bias_by_id(logit_bias: dict[Any, float]) -> dict[int, float]:
    """The same with token ids as integers, and values from -100 to 100.

    Raises:
        ValueError: a key that is no token id, or a value that is no number.
    """
    try:
        # OpenAI documents -100 to 100; further out is the same as at the end.
        return {int(token): min(100.0, max(-100.0, bias)) for token, bias in logit_bias.items()}
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, not {logit_bias}") from None

# SPDX-License-Identifier: Apache-2.0
"""A model's generation_config.json as sampling parameters: the one place where what Transformers
counts and means is turned into what `SamplingParams` do."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

# Fields that mean the same under the same name.
_SAME = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
# Fields that change which tokens come out and that are not supported.
_WITHOUT_EFFECT = (
    "begin_suppress_tokens", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "exponential_decay_length_penalty", "sequence_bias",
    "suppress_tokens",
)  # fmt: skip


# Fields that are no sampling parameters, or are turned into others.
_TURNED = (
    "bad_words_ids", "bos_token_id", "decoder_start_token_id", "do_sample", "early_stopping", "eos_token_id",
    "forced_bos_token_id", "length_penalty", "max_new_tokens", "min_new_tokens", "num_beams",
    "pad_token_id", *_WITHOUT_EFFECT,
)  # fmt: skip


def sampling_defaults(
    generation_config: dict[str, Any],
    is_encoder_decoder: bool,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Sampling parameters by name, so far as the config sets them.

    `overrides`: fields of the config to change, or sampling parameters.

    Of an encoder-decoder model also what Transformers does where a config says nothing (nothing is
    drawn), and its lengths, which count the decoder's prompt. A forced BOS token is part of the
    prompt here, and the first new token there.
    """
    overrides = overrides or {}
    generation_config = {**generation_config, **overrides}
    picked = {name: generation_config[name] for name in _SAME if _is_set(generation_config, name)}
    if generation_config.get("no_repeat_ngram_size"):
        picked["no_repeat_ngram_size"] = generation_config["no_repeat_ngram_size"]
    if _is_set(generation_config, "forced_eos_token_id"):
        picked["forced_eos_token_id"] = generation_config["forced_eos_token_id"]
    if generation_config.get("bad_words_ids"):
        # As in Transformers, the token that ends a text is never one.
        ends = generation_config.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        words = generation_config["bad_words_ids"]
        picked["bad_words_token_ids"] = [ids for ids in words if ids not in [[e] for e in ends]]
    forced_bos = is_encoder_decoder and _is_set(generation_config, "forced_bos_token_id")
    if _is_set(generation_config, "max_new_tokens"):
        picked["max_tokens"] = max(generation_config["max_new_tokens"] - forced_bos, 1)
    if is_encoder_decoder and generation_config:
        _add_encoder_decoder_defaults(picked, generation_config, forced_bos)
    _warn(generation_config)
    return {**picked, **{name: v for name, v in overrides.items() if name not in _TURNED}}


def _add_encoder_decoder_defaults(
    picked: dict[str, Any], generation_config: dict[str, Any], forced_bos: bool
) -> None:
    if not generation_config.get("do_sample"):
        picked["temperature"] = 0.0
    if "max_tokens" not in picked and _is_set(generation_config, "max_length"):
        picked.update(max_tokens=None, max_length=generation_config["max_length"])
    if generation_config.get("min_new_tokens"):
        picked["min_tokens"] = generation_config["min_new_tokens"] - forced_bos
    elif generation_config.get("min_length"):
        picked["min_length"] = generation_config["min_length"]


def _is_set(generation_config: dict[str, Any], name: str) -> bool:
    return generation_config.get(name) is not None


def _warn(generation_config: dict[str, Any]) -> None:
    num_beams = generation_config.get("num_beams") or 1
    if num_beams > 1:
        logger.warning_once(
            "the model's generation config asks for %s beams, which is ignored: beams are followed "
            "only where a request asks for them (use_beam_search, LLM.beam_search)",
            num_beams,
        )
    ignored = [name for name in _WITHOUT_EFFECT if generation_config.get(name)]
    if ignored:
        logger.warning_once(
            "of the model's generation config these have no effect: %s", ", ".join(ignored)
        )

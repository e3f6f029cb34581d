# SPDX-License-Identifier: Apache-2.0
"""generation_config.json as sampling parameters."""

import pytest

from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.generation_defaults import sampling_defaults

# facebook/bart-large-cnn's.
SUMMARISER = {
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "early_stopping": True,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "pad_token_id": 1,
}


def resolved(config: dict, num_prompt_tokens: int, is_encoder_decoder: bool = True):
    params = SamplingParams.from_optional(**sampling_defaults(config, is_encoder_decoder))
    params.resolve_lengths(num_prompt_tokens, 1024)
    return params


def test_an_encoder_decoder_models_defaults_are_transformers():
    """Lengths count the decoder's prompt ([2, 0] here), nothing is drawn, and the rest is as it
    is. Guards against outputs one or two tokens longer or shorter than Transformers'."""
    params = resolved(SUMMARISER, 2)
    assert (params.max_tokens, params.min_tokens) == (140, 54)
    assert params.temperature == 0
    assert params.no_repeat_ngram_size == 3
    assert params.forced_eos_token_id == [2]


def test_new_tokens_do_not_count_the_prompt_but_the_forced_bos():
    """Transformers' first new token is the forced BOS, which is part of the prompt here."""
    config = {**SUMMARISER, "max_new_tokens": 20, "min_new_tokens": 5}
    params = resolved(config, 2)
    assert (params.max_tokens, params.min_tokens) == (19, 4)
    del config["forced_bos_token_id"]
    params = resolved(config, 1)
    assert (params.max_tokens, params.min_tokens) == (20, 5)


def test_a_decoder_only_models_defaults_are_upstreams():
    """Of lengths `max_new_tokens` alone, and drawn as the request says: generation configs of chat
    models state a `max_length` that nobody wants to be kept to."""
    config = {"max_length": 30, "min_length": 5, "temperature": 0.6, "max_new_tokens": 9}
    assert sampling_defaults(config, False) == {"temperature": 0.6, "max_tokens": 9}


def test_without_a_config_there_are_no_defaults():
    """`--generation-config vllm` is the same for every model."""
    assert sampling_defaults({}, True) == {}


def test_beams_and_what_has_no_effect_are_told(caplog_vllm):
    """Nothing of the config is dropped silently."""
    sampling_defaults({**SUMMARISER, "num_beams": 5, "suppress_tokens": [7]}, True)
    assert "5 beams, which is ignored" in caplog_vllm.text
    assert "no effect: suppress_tokens" in caplog_vllm.text


@pytest.mark.parametrize("eos", [2, [2, 3]])
def test_words_that_the_config_forbids(eos):
    """As Transformers, which lets a text end all the same. Guards against a translation model that
    emits padding."""
    config = {**SUMMARISER, "eos_token_id": eos, "bad_words_ids": [[9], [2], [4, 5]]}
    assert sampling_defaults(config, True)["bad_words_token_ids"] == [[9], [4, 5]]


def test_a_requests_own_lengths():
    """`max_tokens` and `max_length` bound both; a minimum gives way to a maximum, as in
    Transformers, where EOS is forbidden until the end."""
    params = SamplingParams(max_tokens=5, max_length=30, min_length=56)
    params.resolve_lengths(2, 1024)
    assert (params.max_tokens, params.min_tokens) == (5, 5)
    params = SamplingParams(max_tokens=50, max_length=30)
    params.resolve_lengths(2, 1024)
    assert params.max_tokens == 28


def test_a_prompt_that_fills_max_length_is_refused():
    with pytest.raises(ValueError, match="leave no room within max_length"):
        SamplingParams(max_tokens=None, max_length=4).resolve_lengths(4, 1024)


def test_overrides_are_fields_of_the_config_or_sampling_parameters():
    """`--override-generation-config`. Guards against a field that is no sampling parameter handed
    on as one, and against a conversion that is skipped for what is overridden."""
    overrides = {"max_new_tokens": 9, "decoder_start_token_id": 5, "seed": 3, "temperature": 0.5}
    picked = sampling_defaults({"temperature": 0.9}, False, overrides)
    assert picked == {"max_tokens": 9, "seed": 3, "temperature": 0.5}
    picked = sampling_defaults(SUMMARISER, True, {"max_length": 30, "do_sample": True})
    assert picked["max_length"] == 30 and "temperature" not in picked
    assert sampling_defaults(SUMMARISER, True, {"temperature": 0.5})["temperature"] == 0.5

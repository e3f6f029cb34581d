# SPDX-License-Identifier: Apache-2.0
"""Prompts and parameters are checked before anything runs, in words for their user."""

from __future__ import annotations

import pytest

from vllm.config import ModelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


@pytest.fixture(scope="module")
def processor(make_config):
    return InputProcessor(make_config(max_model_len=32))


def process(processor, prompt, params=None, **more):
    return processor.process_inputs("r", prompt, params or SamplingParams(), **more)[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([5, -1], "-1 is out of range"),
        ([49152], "49152 is out of range.*0 to 49151"),
        (["a"], "list of integers"),
        ([1.0], "list of integers"),
        ([True], "list of integers"),
        ({"prompt_token_ids": "ab"}, "list of integers"),
        ({"prompt": 3}, "must be a string"),
        ({}, "needs `prompt`"),
        ({"prompt": "a", "token_type_ids": [0]}, "'token_type_ids' are not supported"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "image.*takes text only"),
        ({"prompt": "a", "multi_modal_data": [1]}, "must be a dict"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "encoder-decoder models only"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt is not valid Unicode"),
        (3, "not int"),
        (None, "not NoneType"),
        ([1] * 33, "33 tokens.*32"),
        ([1] * 32, "no room"),
        ("word " * 100, "too long: 1.. tokens"),
    ],
)
def test_bad_prompts(processor, prompt, message):
    """Each would crash the engine, hang it, or be read as something else."""
    with pytest.raises(ValueError, match=message):
        process(processor, prompt)


def test_a_text_with_a_token_that_the_model_lacks(processor, monkeypatch):
    """Tokenizers have added tokens beyond a model's vocabulary at times. Guards against a row that is
    read from behind the embedding's end, or a step that fails for everybody."""
    monkeypatch.setitem(processor.model_config.hf_text_config_dict, "vocab_size", 100)
    with pytest.raises(ValueError, match=r"token id \d+ is out of range: the model has 0 to 99"):
        process(processor, "one more")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs.*at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"max_tokens": None, "min_tokens": 40}, "min_tokens"),
    ],
)
def test_bad_params(processor, params, message):
    """What only the model's config can tell is told before the request runs."""
    with pytest.raises(ValueError, match=message):
        process(processor, "hello", SamplingParams(**params))


def test_what_is_left_to_the_model(processor):
    """max_tokens is what the prompt leaves; the ends of the sequence are the tokenizer's."""
    params = SamplingParams(max_tokens=None)
    request = process(processor, [1, 2], params)
    assert request.sampling_params.max_tokens == 30
    assert request.sampling_params.eos_token_id == processor.tokenizer.eos_token_id
    assert params.max_tokens is None and params.eos_token_id is None
    assert process(processor, [1, 2]).sampling_params.max_tokens == 16


def test_a_prompt_with_one_free_place_is_served(processor):
    """The border itself."""
    assert len(process(processor, [1] * 31).prompt_token_ids) == 31


def test_ids_are_unique_and_the_clients_stay(processor):
    """Two requests of one id run side by side."""
    first, second = process(processor, "a"), process(processor, "a")
    assert first.request_id != second.request_id
    assert first.external_req_id == second.external_req_id == "r"


def test_tokenization_options(processor):
    """Supported ones work; others are refused rather than dropped."""
    plain = process(processor, "a b c d e")
    short = process(
        processor, "a b c d e", tokenization_kwargs={"truncation": True, "max_length": 2}
    )
    assert short.prompt_token_ids == plain.prompt_token_ids[:2]
    with pytest.raises(ValueError, match="padding"):
        process(processor, "a", tokenization_kwargs={"padding": True})


def test_without_a_tokenizer(tokenizer):
    """Ids in, ids out; what needs text is refused with what to do instead."""
    config = VllmConfig(model_config=ModelConfig(max_model_len=32, skip_tokenizer_init=True))
    processor = InputProcessor(config)
    assert process(processor, [1, 2]).sampling_params.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="prompt_token_ids"):
        process(processor, "hello")
    with pytest.raises(ValueError, match="stop_token_ids"):
        process(processor, [1], SamplingParams(stop="a"))
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        processor.get_tokenizer()


def test_requests_survive_the_wire(processor):
    """Every parameter must arrive as it was sent."""
    params = SamplingParams(
        n=1, temperature=0.7, top_p=0.9, top_k=5, seed=3, stop=["a", "b"], logprobs=3,
        logit_bias={1: 2.0}, bad_words=["no"], max_tokens=4, min_tokens=2, extra_args={"x": [1]},
    )  # fmt: skip
    request = process(processor, {"prompt": "hello", "cache_salt": "s"}, params, priority=4)
    data = MsgpackEncoder().encode(request)
    assert MsgpackDecoder(EngineCoreRequest).decode(data) == request

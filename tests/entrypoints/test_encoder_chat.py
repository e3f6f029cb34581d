# SPDX-License-Identifier: Apache-2.0
"""Conversations in a program as prompts of encoder-decoder models."""

import base64
import io

import pytest
from PIL import Image

from tests.inputs import encoder_models
from tests.inputs.conftest import write_model
from vllm.config import ModelConfig
from vllm.entrypoints.encoder_chat import chat_prompts
from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
from vllm.inputs.parse import parse_encoder_decoder_prompt
from vllm.model_executor.models.registry import ModelRegistry
from vllm.tokenizers import get_tokenizer

IMAGE = Image.new("RGB", (4, 3))


@pytest.fixture
def make_preprocessor(tmp_path, monkeypatch):
    def make(model_cls):
        models = {**ModelRegistry.models, model_cls.__name__: model_cls}
        monkeypatch.setattr(ModelRegistry, "models", models)
        folder = write_model(tmp_path, model_cls.__name__)
        return EncoderDecoderPreprocessor(ModelConfig(folder), get_tokenizer(folder))

    return make


def prompts_of(preprocessor, *conversations, **options):
    prompts, tokenization = chat_prompts(
        preprocessor, None, conversations, preprocessor.tokenizer, **options
    )
    return [
        preprocessor.process(parse_encoder_decoder_prompt(prompt), tokenization)
        for prompt in prompts
    ]


def user(content):
    return [{"role": "user", "content": content}]


def data_url():
    buffer = io.BytesIO()
    IMAGE.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<s> {{ m.content }} </s>{% endfor %}"])
def test_texts_are_the_encoders(make_preprocessor, template):
    """Fault: special tokens are missing without a template, or doubled with one."""
    preprocessor = make_preprocessor(encoder_models.TextEncoderForTest)
    conversations = user("the cat"), user([{"type": "text", "text": "the cat"}])
    for made in prompts_of(preprocessor, *conversations, chat_template=template):
        (feature,) = preprocessor.features(made)
        assert feature.data["encoder_input_ids"].data.tolist() == [0, 4, 5, 2]
        assert made["decoder_prompt"]["prompt_token_ids"] == [2, 0]


def test_images_as_urls_and_as_pil(make_preprocessor):
    preprocessor = make_preprocessor(encoder_models.ImageEncoderForTest)
    parts = (
        {"type": "image_url", "image_url": {"url": data_url()}},
        {"type": "image_pil", "image_pil": IMAGE},
    )
    text = {"type": "text", "text": "sat on"}
    made = prompts_of(preprocessor, *(user([part, text]) for part in parts))
    features = [preprocessor.features(one)[0] for one in made]
    assert [feature.data["sizes"].data.tolist() for feature in features] == [[4, 3]] * 2
    assert features[0].identifier == features[1].identifier
    assert [one["decoder_prompt"]["prompt_token_ids"] for one in made] == [[2, 6, 7]] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_pil", "image_pil": "x"}], "image 0 must be a PIL image"),
        ([{"type": "image_url", "image_url": "http://a.test/"}], r"\[0\].image_url: media of a.test"),
        ([{"type": "video_url"}], "supported: text, image_url, image_pil"),
        ("sat on", "no image"),
    ],
)
def test_wrong_messages(make_preprocessor, content, message):
    preprocessor = make_preprocessor(encoder_models.ImageEncoderForTest)
    with pytest.raises(ValueError, match=message):
        prompts_of(preprocessor, user(content))


def test_the_processor_is_made_ahead_and_what_is_wrong_told_later(make_preprocessor, caplog):
    """Fault: an error in the thread is lost, or ends the server."""
    preprocessor = make_preprocessor(encoder_models._Model)
    with pytest.raises(ValueError, match="_Model has no processor"):
        prompts_of(preprocessor, user("a"))
    preprocessor.prepare_in_background()
    with pytest.raises(ValueError, match="_Model has no processor"):
        preprocessor.process(parse_encoder_decoder_prompt("a"))

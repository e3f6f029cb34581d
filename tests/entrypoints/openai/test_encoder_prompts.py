# SPDX-License-Identifier: Apache-2.0
"""Requests to encoder-decoder models: what comes in as text, ids or parts reaches the engine as an
encoder input and a decoder prompt; what cannot is answered with 400 and the place of the fault."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time

import httpx
import pytest
from PIL import Image

from tests.entrypoints.openai.conftest import FakeServer
from tests.entrypoints.openai.fake_engine import FakeEngine, hello
from tests.inputs import encoder_models
from tests.inputs.conftest import write_model
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.encoder_prompts import EncoderPrompts
from vllm.entrypoints.openai.protocol.common import RequestError
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.serving_prompt import EnginePrompt
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.media.connector import MAX_CONCURRENT_MEDIA, MediaConnector
from vllm.v1.engine.input_processor import InputProcessor

TEXT, IMAGE = "TextEncoderForTest", "ImageEncoderForTest"
CAT, TASK = [0, 4, 5, 2], [2, 6, 7]  # <s> the cat </s>; </s> sat on


class EncoderDecoderEngine(FakeEngine):
    """Takes the prompts of an encoder-decoder model; `requests` are what an engine core would
    get."""

    def __init__(self, folder: str, **options) -> None:
        super().__init__(hello)
        self.model_config = ModelConfig(folder, **options)
        self.vllm_config.model_config = self.model_config
        self.processor = InputProcessor(VllmConfig(model_config=self.model_config))
        self.encoder_decoder = self.processor.encoder_decoder
        self.requests = []

    async def generate(self, prompt, sampling_params, request_id, *, priority=0):
        request, _ = self.processor.process_inputs(request_id, prompt, sampling_params)
        self.requests.append(request)
        ids = {"prompt_token_ids": request.prompt_token_ids}
        async for output in super().generate(ids, sampling_params, request_id, priority=priority):
            yield output

    @property
    def feature(self) -> MultiModalFeatureSpec:
        (feature,) = self.requests[-1].mm_features
        return feature

    def get_tokenizer(self):
        return self.processor.tokenizer


@pytest.fixture(scope="module")
def _models():
    classes = (encoder_models.TextEncoderForTest, encoder_models.ImageEncoderForTest)
    before = dict(ModelRegistry.models)
    ModelRegistry.models.update({cls.__name__: cls for cls in classes})
    yield
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


@pytest.fixture(scope="module")
def texts(_models, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("texts"), TEXT)
    with FakeServer(EncoderDecoderEngine(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def images(_models, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("images"), IMAGE, generation={})
    with FakeServer(EncoderDecoderEngine(folder, allowed_media_domains=["localhost"])) as server:
        yield server


@pytest.fixture(scope="module")
def templated(_models, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("templated"), TEXT)
    template = "{% for m in messages %}<s> {{ m.content }} </s>{% endfor %}"
    with FakeServer(EncoderDecoderEngine(folder), FrontendArgs(chat_template=template)) as server:
        yield server


def complete(server, prompt, **more):
    return server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **more})


def chat(server, content, **more):
    messages = content if isinstance(content, list) and "role" in content[0] else [
        {"role": "user", "content": content}
    ]  # fmt: skip
    body = {"messages": messages, "max_tokens": 2, **more}
    return server.client.post("/v1/chat/completions", json=body)


def error_of(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def data_url(size=(4, 3)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def image_part(url=None) -> dict:
    return {"type": "image_url", "image_url": {"url": url or data_url(), "detail": "auto"}}


def text_part(text="sat on") -> dict:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("prompt", ["the cat", CAT, [text_part("the cat")]])
def test_a_completions_prompt_is_the_encoders_text(texts, prompt):
    """Fault: it is taken for the decoder's. The usage counts what both read."""
    response = complete(texts, prompt, return_token_ids=True, cache_salt="mine")
    assert response.status_code == 200, response.text
    engine = texts.engine
    assert engine.requests[-1].prompt_token_ids == [2, 0]
    assert engine.feature.data["encoder_input_ids"].data.tolist() == CAT
    assert engine.requests[-1].cache_salt == "mine"
    assert response.json()["choices"][0]["prompt_token_ids"] == [2, 0]
    assert response.json()["usage"]["prompt_tokens"] == 6


def test_an_empty_text(texts):
    """Its special tokens are read, as Transformers reads them; without those there is nothing."""
    assert complete(texts, "").status_code == 200
    assert texts.engine.feature.data["encoder_input_ids"].data.tolist() == [CAT[0], CAT[-1]]
    assert "text 0 is empty" in error_of(complete(texts, "", add_special_tokens=False))


def test_several_prompts(texts):
    before = len(texts.engine.requests)
    assert len(complete(texts, ["the cat", "the mat"]).json()["choices"]) == 2
    made = texts.engine.requests[before:]
    assert len({request.mm_features[0].identifier for request in made}) == 2


def test_special_tokens_can_be_left_out(texts):
    complete(texts, "the cat", add_special_tokens=False)
    assert texts.engine.feature.data["encoder_input_ids"].data.tolist() == CAT[1:-1]


@pytest.mark.parametrize("content", ["the cat", [text_part("the"), text_part("cat")]])
def test_chat_without_a_template_is_one_message(texts, content):
    response = chat(texts, content)
    assert response.status_code == 200, response.text
    assert texts.engine.feature.data["encoder_input_ids"].data.tolist() == CAT
    assert response.json()["usage"]["prompt_tokens"] == 6
    two = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert "no chat template: messages must be one" in error_of(chat(texts, two))


def test_chat_with_a_template(templated):
    """Fault: special tokens are put around those that the template wrote."""
    assert chat(templated, "the cat").status_code == 200
    assert templated.engine.feature.data["encoder_input_ids"].data.tolist() == CAT


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_image_goes_to_the_encoder_and_the_text_to_the_decoder(images, is_chat):
    send = chat if is_chat else complete
    for stream in (False, True):
        response = send(images, [text_part(), image_part()], stream=stream)
        assert response.status_code == 200, response.text
        engine = images.engine
        assert engine.requests[-1].prompt_token_ids == TASK
        assert engine.feature.modality == "image"
        assert engine.feature.data["sizes"].data.tolist() == [4, 3]
    assert "data: [DONE]" in response.text


def test_an_image_url_may_be_a_plain_text(images):
    part = {"type": "image_url", "image_url": data_url((2, 2))}
    assert chat(images, [part, text_part()]).status_code == 200
    assert images.engine.feature.data["sizes"].data.tolist() == [2, 2]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([text_part()], "no image: the model needs one"),
        ([text_part(), image_part(), image_part()], "2 of image"),
        ([text_part(), image_part(), image_part(), image_part()], "3 images.* at most 2"),
        ([image_part("data:image/png;base64,QQ==")], "[0].image_url: the image cannot be read"),
        ([text_part(), image_part("data:text/html,x")], "[1].image_url: a data URL must be"),
        ([image_part("http://images.test/a.png")], "media of images.test are not fetched"),
        ([image_part("http://127.0.0.1:1/a.png")], "media of 127.0.0.1 are not fetched"),
        ([image_part("http://localhost:1/a.png")], "its address is not public"),
        ([image_part("file:///etc/passwd")], "file URLs are not supported"),
        ([{"type": "image_url"}], 'must be of the form {"url": "..."}'),
        ([{"type": "image_url", "image_url": {"url": 3}}], 'must be of the form {"url": "..."}'),
        ([{"type": "image_pil", "image_pil": 3}], "not supported; supported: text, image_url"),
        ([{"type": "input_audio"}], "not supported; supported: text, image_url"),
        ([{"text": "x"}], "must be a part such as"),
    ],
    ids=str,
)
def test_wrong_parts_are_named(images, parts, message, is_chat):
    """Fault: one bad request ends others, or says nothing of what is wrong."""
    send = chat if is_chat else complete
    import re

    error = error_of(send(images, parts))
    pattern = message if ".*" in message else re.escape(message)
    assert re.search(pattern, error), error
    assert send(images, [text_part(), image_part()]).status_code == 200


def test_a_text_alone_lacks_the_image(images):
    for prompt in ("sat on", [6, 7]):
        assert "no image: the model needs one" in error_of(complete(images, prompt))


def test_images_are_refused_by_models_that_read_text(texts, fake_text_server):
    for send in (chat, complete):
        assert "supported: text" in error_of(send(texts, [image_part()]))
    assert "supported: text" in error_of(chat(fake_text_server, [image_part()]))
    assert "content parts" in error_of(complete(fake_text_server, [text_part()]))


@pytest.fixture
def fake_text_server():
    """Of a decoder-only model."""
    with FakeServer(FakeEngine(hello)) as server:
        yield server


@pytest.mark.parametrize("options", [{"echo": True}, {"truncate_prompt_tokens": 1}])
def test_options_without_meaning_are_refused(texts, options):
    for send in (chat, complete):
        (name,) = options
        assert name in error_of(send(texts, "the cat", **options))


def test_texts_that_are_too_long_are_refused(texts):
    for send in (chat, complete):
        error = error_of(send(texts, "cat " * 11))
        assert "13 tokens, and this model's encoder takes at most 12" in error


def test_mixed_prompts_are_refused(texts):
    for prompt in ([text_part(), "x"], [text_part(), 3]):
        assert "mixes" in error_of(complete(texts, prompt))


def test_surrogates_are_refused(texts):
    """Fault: half a surrogate pair reaches the tokenizer, whose error is a traceback."""
    body = json.dumps({"prompt": [{"type": "text", "text": "\ud800"}], "max_tokens": 2})
    response = texts.client.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert "Unicode" in error_of(response)


class CountingMedia(MediaConnector):
    """Images that were fetched and not yet processed: now, and at most."""

    num_held = most = 0

    async def fetch_image_async(self, image_url):
        image = await super().fetch_image_async(image_url)
        self.num_held += 1
        self.most = max(self.most, self.num_held)
        return image


def test_images_that_wait_for_the_processor_are_few(_models, tmp_path, monkeypatch):
    """Fault: hundreds of requests at once are decoded while the processor works on the first, and
    take all memory. One that is refused, or given up, gives its place back."""
    engine = EncoderDecoderEngine(write_model(tmp_path, IMAGE, generation={}))
    media = CountingMedia()
    process = engine.encoder_decoder.process

    def slowly(*args, **kwargs):
        time.sleep(0.005)
        try:
            return process(*args, **kwargs)
        finally:
            media.num_held -= 1

    monkeypatch.setattr(engine.encoder_decoder, "process", slowly)
    prompts = EncoderPrompts(engine.encoder_decoder, media)
    bad, good = [image_part("data:image/png;base64,QQ==")], [image_part()]
    request = CompletionRequest(prompt="x")

    async def all_at_once():
        ask = [prompts.of_completion(each, request) for each in [bad, good] * 40]
        tasks = [asyncio.create_task(each) for each in ask]
        await asyncio.sleep(0.01)
        tasks[-1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(all_at_once())
    assert [type(each) for each in answers[:-1]] == [RequestError, EnginePrompt] * 39 + [RequestError]
    assert media.num_held == 0 and 1 < media.most <= MAX_CONCURRENT_MEDIA

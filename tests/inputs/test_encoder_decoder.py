# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoder-decoder models: whatever their form, the encoder and the decoder get what
Transformers' `generate` would give them."""

import subprocess
import sys

import pytest
from PIL import Image

from tests.inputs import encoder_models
from vllm.config import ModelConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

START, BOS = 2, 0
CAT = [0, 4, 5, 2]  # <s> the cat </s>
SAT = [6, 7]  # sat on


@pytest.fixture(autouse=True)
def models(monkeypatch):
    classes = (encoder_models.TextEncoderForTest, encoder_models.ImageEncoderForTest)
    named = {cls.__name__: cls for cls in classes}
    monkeypatch.setattr(ModelRegistry, "models", {**ModelRegistry.models, **named})


@pytest.fixture
def make_processor(make_model):
    def make(*, options=None, **more):
        config = ModelConfig(make_model(**more), **(options or {}))
        return InputProcessor(VllmConfig(model_config=config))

    return make


def process(processor, prompt, **more):
    request, _ = processor.process_inputs("r", prompt, SamplingParams(max_tokens=2), **more)
    decoder = MsgpackDecoder(EngineCoreRequest)
    return decoder.decode(MsgpackEncoder().encode(request))


def encoder_ids(request):
    (feature,) = request.mm_features
    assert feature.mm_position.offset == 0
    ids = feature.data["encoder_input_ids"].data.tolist()
    assert feature.mm_position.length == len(ids)
    return ids


ENCODER_FORMS = [
    "the cat",
    CAT,
    {"prompt": "the cat"},
    {"prompt_token_ids": CAT},
    {"prompt": "", "multi_modal_data": {"text": "the cat"}},
    {"prompt": "", "multi_modal_data": {"text": ["the cat"]}},
    {"prompt": "", "multi_modal_data": {"text": CAT}},
    {"prompt": "", "multi_modal_data": {"text": [CAT]}},
]


@pytest.mark.parametrize("form", ENCODER_FORMS, ids=str)
@pytest.mark.parametrize("is_pair", [False, True])
def test_all_forms_of_an_encoder_prompt_agree(make_processor, form, is_pair):
    """Fault: one form loses the special tokens, or has the encoder's text as decoder prompt."""
    prompt = {"encoder_prompt": form, "decoder_prompt": None} if is_pair else form
    request = process(make_processor(), prompt)
    assert encoder_ids(request) == CAT
    assert request.prompt_token_ids == [START, BOS]


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (None, [START, BOS]),
        ("", [START, BOS]),
        ([START], [START, BOS]),
        ("</s>", [START, BOS]),
        ("<s>", [START, BOS]),
        ([START, BOS], [START, BOS]),
        ("</s><s>", [START, BOS]),
        ("<s> sat on", [START, BOS, *SAT]),
        ("sat on", [START, *SAT]),
        (SAT, [START, *SAT]),
        ([START, *SAT], [START, *SAT]),
        ({"prompt": "sat on"}, [START, *SAT]),
        ({"prompt_token_ids": SAT}, [START, *SAT]),
        ({"prompt_token_ids": SAT, "prompt": "for the record"}, [START, *SAT]),
        ([BOS, 894 % 16, 13, 7, 14, START], [START, BOS, 14, 13, 7, 14, START]),
    ],
)
@pytest.mark.parametrize("encoder", ["the cat", {"prompt": "mat", "multi_modal_data": {"text": CAT}}])
def test_all_forms_of_a_decoder_prompt_agree(make_processor, encoder, decoder, expected):
    """Fault: the start token is put in front twice, or not at all; the encoder's placeholder text
    ("mat") is taken for the decoder's."""
    request = process(make_processor(), {"encoder_prompt": encoder, "decoder_prompt": decoder})
    assert request.prompt_token_ids == expected
    assert encoder_ids(request) == CAT


def test_a_single_prompt_beside_an_encoder_input_is_the_decoders(make_processor):
    prompt = {"prompt": "sat on", "multi_modal_data": {"text": "the cat"}}
    assert process(make_processor(), prompt).prompt_token_ids == [START, *SAT]


@pytest.mark.parametrize(
    ("generation", "config", "options", "expected"),
    [
        ({}, {}, {}, [2]),
        ({"forced_bos_token_id": 5}, {}, {}, [2, 5]),
        ({"decoder_start_token_id": 9, "forced_bos_token_id": 5}, {}, {}, [9, 5]),
        ({"forced_bos_token_id": 5}, {}, {"generation_config": "vllm"}, [2]),
        ({}, {}, {"override_generation_config": {"forced_bos_token_id": 7}}, [2, 7]),
        ({}, {"decoder_start_token_id": None, "bos_token_id": 1}, {}, [1]),
    ],
)
def test_where_the_start_and_the_forced_token_come_from(
    make_processor, generation, config, options, expected
):
    """Fault: a token of BART's is written into the code; mBART begins with its language."""
    processor = make_processor(generation=generation, options=options, **config)
    assert process(processor, "the cat").prompt_token_ids == expected


def test_a_model_without_a_start_token_is_refused_with_advice(make_processor):
    processor = make_processor(decoder_start_token_id=None)
    with pytest.raises(ValueError, match="override-generation-config"):
        process(processor, "the cat")


BAD_TEXT_PROMPTS = [
    ("word " * 99, "495 characters are more than the 12 tokens of this model's encoder can hold"),
    ("a " * 20, "text is too long: 22 tokens, and this model's encoder takes at most 12"),
    ([], "text 0 is empty"),
    ([16], "16 is out of range: the model has 0 to 15"),
    ({"encoder_prompt": "a", "decoder_prompt": [77]}, "77 is out of range"),
    ({"prompt": "", "multi_modal_data": {"image": 1}}, "takes no image; it takes: text"),
    ({"prompt": "", "multi_modal_data": {"text": ["a", "a"]}}, "2 of text.*at most 1"),
    ({"prompt": "", "multi_modal_data": {"text": 3.5}}, "text"),
    ({"prompt": "", "multi_modal_data": {"text": [b"a"]}}, "text 0 must be a string"),
    ({"prompt": "", "multi_modal_data": "x"}, "must be a dict"),
    ({"decoder_prompt": "a"}, "an encoder_prompt must come with"),
    ({"encoder_prompt": "a", "decoder_prompt": 3}, "decoder_prompt: .*not int"),
    ({"encoder_prompt": {}, "decoder_prompt": None}, "encoder_prompt: .*needs `prompt`"),
    ({"encoder_prompt": "a", "decoder": "b"}, "'decoder'"),
    (
        {"encoder_prompt": "a", "decoder_prompt": {"prompt": "", "multi_modal_data": {"text": "a"}}},
        "belong to the encoder_prompt",
    ),
    ({"encoder_prompt": "a", "decoder_prompt": [4] * 12}, "too long: 13 tokens"),
    ({"encoder_prompt": "a", "decoder_prompt": [4] * 11}, "no room"),
    ({"prompt": "a", "mm_processor_kwargs": {"size": 3}}, "size.*not supported by this model"),
    ({"prompt": "a", "multi_modal_uuids": {"text": ["a", "b"]}}, "1 of text, but 2"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_TEXT_PROMPTS, ids=str)
def test_errors_name_what_is_wrong(make_processor, prompt, message):
    with pytest.raises(ValueError, match=message):
        process(make_processor(), prompt)


def test_the_longest_encoder_input_is_served(make_processor):
    """The border itself: 12 positions. The decoder's context does not bound it."""
    processor = make_processor(options={"max_model_len": 8})
    assert len(encoder_ids(process(processor, [4] * 12))) == 12


def test_truncation_is_of_the_encoders_text_from_its_end(make_processor):
    """Fault: the text loses its beginning or its </s>."""
    options = {"truncation": True, "max_length": 4}
    for text in ("the cat sat on a mat", "the cat " * 99):
        assert encoder_ids(process(make_processor(), text, tokenization_kwargs=options)) == CAT
    with pytest.raises(ValueError, match="truncate_prompt_tokens is not supported"):
        process(make_processor(), "a", tokenization_kwargs={"truncate_prompt_tokens": 1})


def test_equal_inputs_have_one_identifier_and_others_their_own(make_processor):
    """Fault: cross-attention pages of another text are taken."""
    processor = make_processor()
    one, same, other = (process(processor, text) for text in ("the cat", "the cat", "the mat"))
    plain = process(processor, "the cat", tokenization_kwargs={"add_special_tokens": False})
    ids = [request.mm_features[0].identifier for request in (one, same, other, plain)]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    named = {"prompt": "the cat", "multi_modal_uuids": {"text": "mine"}}
    assert process(processor, named).mm_features[0].identifier == "mine"


def test_without_a_tokenizer_ids_are_served_and_texts_refused(make_processor):
    processor = make_processor(options={"skip_tokenizer_init": True})
    prompt = {"encoder_prompt": CAT, "decoder_prompt": SAT}
    assert process(processor, prompt).prompt_token_ids == [START, *SAT]
    for bad in ("the cat", {"encoder_prompt": CAT, "decoder_prompt": "sat"}):
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            process(processor, bad)


_FIRST_PROMPTS_AT_ONCE = """
import sys, threading
from tests.inputs import encoder_models
from vllm.config import ModelConfig
from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
from vllm.inputs.parse import parse_encoder_decoder_prompt
from vllm.model_executor.models.registry import ModelRegistry

ModelRegistry.models["TextEncoderForTest"] = encoder_models.TextEncoderForTest
preprocessor = EncoderDecoderPreprocessor(ModelConfig(sys.argv[1]), None)
assert "transformers" not in sys.modules
start = threading.Barrier(16)
made = []

def process():
    start.wait()
    made.append(preprocessor.process(parse_encoder_decoder_prompt([0, 4, 2])))

threads = [threading.Thread(target=process) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(made))
"""


def test_the_first_prompts_may_come_at_once(make_model):
    """Fault: threads import transformers together, and all but one fail with an ImportError: a
    server that has just started answers 500."""
    command = [sys.executable, "-c", _FIRST_PROMPTS_AT_ONCE, make_model()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "16", done.stderr


def test_a_decoders_text_of_megabytes_is_refused_before_it_is_tokenised(make_processor):
    """Fault: it keeps a core busy for seconds only to be refused."""
    processor = make_processor(options={"max_model_len": 8})
    text = "cat " * 1000
    forms = (
        {"encoder_prompt": CAT, "decoder_prompt": text},
        {"prompt": text, "multi_modal_data": {"text": CAT}},
    )
    for prompt in forms:
        with pytest.raises(ValueError, match="decoder's text is too long: 4000 characters"):
            process(processor, prompt)


# Images

IMAGE = Image.new("RGB", (4, 3))


@pytest.fixture
def reader(make_processor):
    return make_processor(architecture="ImageEncoderForTest", generation={})


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "the cat", "multi_modal_data": {"image": IMAGE}},
        {"prompt_token_ids": [4, 5], "multi_modal_data": {"image": [IMAGE]}},
        {
            "encoder_prompt": {"prompt": "mat", "multi_modal_data": {"image": IMAGE}},
            "decoder_prompt": "the cat",
        },
    ],
    ids=str,
)
def test_an_image_with_the_decoders_prompt(reader, prompt):
    request = process(reader, prompt)
    (feature,) = request.mm_features
    assert request.prompt_token_ids == [START, 4, 5]
    assert feature.modality == "image" and feature.data["sizes"].data.tolist() == [4, 3]
    assert feature.mm_position.length == encoder_models.TOKENS_PER_IMAGE


def test_the_encoders_placeholder_is_never_the_decoders_prompt(reader):
    encoder = {"prompt": "the cat", "multi_modal_data": {"image": IMAGE}}
    request = process(reader, {"encoder_prompt": encoder, "decoder_prompt": None})
    assert request.prompt_token_ids == [START]


def broken_image(tmp_path):
    path = tmp_path / "half.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:700])
    return Image.open(path)


def test_wrong_images_are_named(reader, tmp_path):
    """Fault: they break the engine, or the server answers with a traceback."""
    for data, message in [
        (None, "no image: the model needs one"),
        ([], "nothing; the model takes: image"),
        ([IMAGE, IMAGE], "one input, and multi_modal_data has 2 of image"),
        ([IMAGE] * 3, "3 of image, and the model takes at most 2"),
        (broken_image(tmp_path), "image 0 cannot be decoded"),
        ("image.png", "image 0 must be a PIL image, an array or a tensor, not str"),
    ]:
        with pytest.raises(ValueError, match=message):
            process(reader, {"prompt": "the", "multi_modal_data": {"image": data}})
    for prompt in ("the cat", [4, 5]):
        with pytest.raises(ValueError, match="no image: the model needs one"):
            process(reader, prompt)


def test_the_users_limit_and_processor_arguments(make_processor):
    options = {"multimodal_config": MultiModalConfig({"image": 0}, {"scale": 2})}
    refused = make_processor(architecture="ImageEncoderForTest", options=options)
    prompt = {"prompt": "", "multi_modal_data": {"image": IMAGE}}
    with pytest.raises(ValueError, match="1 of image, and --limit-mm-per-prompt allows at most 0"):
        process(refused, prompt)
    options = {"multimodal_config": MultiModalConfig(mm_processor_kwargs={"scale": 2})}
    processor = make_processor(architecture="ImageEncoderForTest", options=options)
    one = process(processor, prompt).mm_features[0]
    other = process(processor, {**prompt, "mm_processor_kwargs": {"scale": 3}}).mm_features[0]
    assert one.data["sizes"].data.tolist() == [8, 6] and other.data["sizes"].data.tolist() == [12, 9]
    assert one.identifier != other.identifier
    with pytest.raises(ValueError, match="measure cannot take images.*shape"):
        process(processor, {**prompt, "mm_processor_kwargs": {"shape": 3}})


# Processors of model classes


def test_the_registry_finds_processors_by_class(make_model):
    """Fault: a model that inherits from a registered one has no processor; one without any gets
    another's."""

    class Derived(encoder_models.TextEncoderForTest):
        pass

    config = ModelConfig(make_model())
    registry = encoder_models.MULTIMODAL_REGISTRY
    ModelRegistry.models["TextEncoderForTest"] = Derived
    assert registry.supports_multimodal_inputs(config)
    assert type(registry.create_processor(config)) is encoder_models.TextEncDecProcessor
    assert registry.get_processing_info(config).allowed_mm_limits == {"text": 1}
    ModelRegistry.models["TextEncoderForTest"] = encoder_models._Model
    assert not registry.supports_multimodal_inputs(config)
    with pytest.raises(ValueError, match="_Model has no processor"):
        registry.create_processor(config)


def test_dummy_inputs_are_of_the_largest_size(make_model):
    """Fault: memory is planned, or kernels are warmed up, for smaller inputs than come."""
    config = ModelConfig(make_model())
    dummy = encoder_models.MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"text": 1})
    assert dummy["mm_placeholders"]["text"][0].length == 12
    options = {"multimodal_config": MultiModalConfig({"image": {"count": 2, "width": 2}})}
    config = ModelConfig(make_model(architecture="ImageEncoderForTest"), **options)
    dummy = encoder_models.MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"image": 1})
    assert dummy["mm_kwargs"]["image"][0]["sizes"].data.tolist() == [2, 4]
    with pytest.raises(ValueError, match="at most 2"):
        encoder_models.MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"image": 3})


def test_one_salt_for_both_parts(make_processor):
    """Fault: the decoder's is dropped without a word, and its pages shared where they should not."""
    processor = make_processor()
    cat, sat = {"prompt": "the cat"}, {"prompt": "sat on"}
    for encoder, decoder in (("a", None), (None, "a"), ("a", "a")):
        pair = {
            "encoder_prompt": {**cat, **({"cache_salt": encoder} if encoder else {})},
            "decoder_prompt": {**sat, **({"cache_salt": decoder} if decoder else {})},
        }
        assert process(processor, pair).cache_salt == "a"
    pair = {
        "encoder_prompt": {**cat, "cache_salt": "a"}, "decoder_prompt": {**sat, "cache_salt": "b"}
    }  # fmt: skip
    with pytest.raises(ValueError, match="different cache_salts"):
        process(processor, pair)

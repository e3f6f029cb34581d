# SPDX-License-Identifier: Apache-2.0
"""Images are fitted onto the page, and a prompt's text is the decoder's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tests.models.nemotron_parse.pages import WITH_BOXES
from tests.models.nemotron_parse.trained import FOLDER

from vllm.config import ModelConfig
from vllm.model_executor.models.nemotron_parse_processor import fit_to_page, to_image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.tokenizers import get_tokenizer

HEIGHT, WIDTH = 64, 256


@pytest.fixture(scope="module")
def processor():
    config = ModelConfig(model=str(FOLDER), dtype="float32")
    return MULTIMODAL_REGISTRY.create_processor(config, tokenizer=get_tokenizer(str(FOLDER)))


def process(processor, prompt, image):
    return processor(prompt, processor.info.parse_mm_data({"image": image}))


def black_box(page: Image.Image) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of all that is not white."""
    rows, columns = np.nonzero(np.asarray(page).min(axis=2) < 128)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((256, 64), (0, 0, 256, 64)),
        ((100, 20), (78, 22, 178, 42)),  # smaller: kept as it is
        ((1024, 64), (0, 24, 256, 40)),  # too wide: a quarter
        ((64, 640), (125, 0, 131, 64)),  # too high: a tenth
        ((512, 512), (96, 0, 160, 64)),
        ((5, 4000), (127, 0, 128, 64)),  # never narrower than a pixel
    ],
)
def test_fitted_with_its_aspect_in_the_middle(size, box):
    """Guards against stretching, cutting off, enlarging, and a swap of height and width."""
    page = fit_to_page(Image.new("RGB", size, "black"), HEIGHT, WIDTH)
    assert page.size == (WIDTH, HEIGHT) and page.mode == "RGB"
    assert black_box(page) == box


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_of_image(mode):
    """Guards against a scan in grey or a transparent drawing that fails or turns black."""
    if mode == "I;16":
        image = Image.fromarray(np.full((HEIGHT, WIDTH), 65535, dtype=np.uint16))
    else:
        image = Image.new("RGBA", (WIDTH, HEIGHT), (255, 255, 255, 255)).convert(mode)
    page = np.asarray(fit_to_page(image, HEIGHT, WIDTH))
    assert page.shape == (HEIGHT, WIDTH, 3) and (page == 255).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    image = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
    ImageDraw.Draw(image).rectangle((10, 20, 29, 39), fill=(0, 0, 0, 255))
    image = image.quantize() if mode == "P" else image.convert(mode)
    assert image.mode == mode
    assert black_box(fit_to_page(image, HEIGHT, WIDTH)) == (10, 20, 30, 40)


def test_arrays_and_tensors():
    """An image in any of the forms that clients hold it in is the same image."""
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    expected = fit_to_page(Image.fromarray(array), HEIGHT, WIDTH).tobytes()
    channels_first = array.transpose(2, 0, 1)
    floats = torch.from_numpy(channels_first.astype(np.float32) / 255)
    for image in (array, channels_first, floats, torch.from_numpy(array)):
        assert fit_to_page(to_image(image), HEIGHT, WIDTH).tobytes() == expected
    with pytest.raises(ValueError, match="channels"):
        to_image(np.zeros((HEIGHT, WIDTH, 7)))


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt(processor, as_ids):
    """The task tokens are the decoder's, without a `<s>` or `</s>` more; the encoder has a place for
    each of its tokens."""
    tokenizer = processor.info.get_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(f"{token}>") for token in WITH_BOXES.split(">")[:-1]]
    assert tokenizer.encode(WITH_BOXES) != ids, "the tokenizer adds nothing: no test"
    image = Image.new("RGB", (300, 300), "white")
    output = process(processor, ids if as_ids else WITH_BOXES, image)
    assert output["prompt_token_ids"] == ids
    (place,) = output["mm_placeholders"]["image"]
    assert (place.offset, place.length) == (0, 17)
    assert len(output["encoder_prompt_token_ids"]) == 17


def test_pixels(processor):
    """Bytes, channels first, as the image has them."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (10, 20, 30))
    pixels = process(processor, "", image)["mm_kwargs"].get_data()["pixel_values"]
    assert pixels.shape == (1, 3, HEIGHT, WIDTH) and pixels.dtype == torch.uint8
    assert pixels.flatten(2)[0].unique(dim=1).tolist() == [[10], [20], [30]]


def test_hashes(processor):
    """The same image is known again, another is not taken for it."""
    images = [Image.new("RGB", (40, 40), colour) for colour in ("black", "black", "red")]
    hashes = [process(processor, "", image)["mm_hashes"]["image"][0] for image in images]
    assert hashes[0] == hashes[1] != hashes[2]


def test_refusals(processor):
    """What a user may get wrong is said by name."""
    image = Image.new("RGB", (40, 40))
    with pytest.raises(ValueError, match="2 of image"):
        process(processor, "", [image, image])
    with pytest.raises(ValueError, match="no text; it takes: image"):
        processor.info.parse_mm_data({"text": "a"})
    items = processor.info.parse_mm_data({"image": image})
    with pytest.raises(ValueError, match=r"mm_processor_kwargs \(size\)"):
        processor("", items, hf_processor_mm_kwargs={"size": 3})


def test_dummy_inputs(processor):
    """The largest input has as many encoder tokens as every other."""
    config = processor.info.ctx.model_config
    output = MULTIMODAL_REGISTRY.get_dummy_mm_inputs(config, {"image": 1}, processor=processor)
    assert len(output["encoder_prompt_token_ids"]) == 17
    assert processor.info.get_mm_max_tokens_per_item(256, {"image": 1}) == {"image": 17}

# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse against a model of Transformers' parts in float32, token for token: one that was
trained to read, and random ones, whose tokens a wrong weight or a neighbour's image changes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.models.nemotron_parse.pages import (
    END,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    TEXT_ALONE,
    WITH_BOXES,
    Page,
    draw_page,
    make_tokenizer,
)
from tests.models.nemotron_parse.reference import (
    ReferenceNemotronParse,
    Shape,
    random_reference,
    to_pixels,
)
from tests.models.nemotron_parse.trained import FOLDER, held_out_pages

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

NUM_PAGES = 32
MAX_TOKENS = 48
RANDOM_VOCABULARY = 131


def make_llm(folder: Path, **options) -> LLM:
    defaults = dict(max_model_len=128, max_num_batched_tokens=128, kv_cache_memory_bytes=8 << 20)
    return LLM(model=str(folder), dtype="float32", **{**defaults, **options})


def num_preemptions(llm: LLM) -> int:
    """Of all engines of this process so far."""
    return next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


# The trained model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(FOLDER)


@cache
def trained_answers() -> tuple[tuple[int, ...], ...]:
    """What the reference says to the held-out pages."""
    tokenizer = make_tokenizer()
    shape = Shape((PAGE_HEIGHT, PAGE_WIDTH), tokenizer.get_vocab_size())
    model, end = ReferenceNemotronParse(shape).load(FOLDER), tokenizer.token_to_id(END)
    answers = []
    for page, task in held_out_pages(NUM_PAGES):
        prompt = tokenizer.encode(task, add_special_tokens=False).ids
        answers.append(tuple(model.generate(to_pixels(page.image), prompt, MAX_TOKENS, end)))
    return tuple(answers)


def read(llm: LLM, pages: Sequence[tuple[Page, str]]) -> tuple[list[tuple[int, ...]], list[str]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    prompts = [
        {"prompt": task, "multi_modal_data": {"image": page.image}} for page, task in pages
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [tuple(output.token_ids) for output in outputs], [output.text for output in outputs]


def test_reads_pages_it_never_saw(llm):
    """The model is no random one: it reads. Guards against images that arrive changed."""
    pages = held_out_pages(200)
    _, texts = read(llm, pages)
    right = [text == page.answer(task) for text, (page, task) in zip(texts, pages, strict=True)]
    assert sum(right) >= 0.9 * len(pages)


def test_equals_transformers_alone_together_and_again(llm):
    """Alone; then all together; then again, their images' keys and values being cached."""
    pages, expected = held_out_pages(NUM_PAGES), list(trained_answers())
    llm.reset_prefix_cache()
    assert [read(llm, [page])[0][0] for page in pages[:8]] == expected[:8]
    llm.reset_prefix_cache()
    assert read(llm, pages)[0] == expected
    assert read(llm, pages)[0] == expected


def test_equals_transformers_under_preemption():
    """Requests whose pages are taken away encode their image again, and end with the same
    tokens."""
    # Of the longest request: 53 tokens of its own and 17 of the encoder.
    small = make_llm(
        FOLDER, max_model_len=64, num_gpu_blocks_override=1 + 4 + 2 + 9, disable_log_stats=False
    )
    before = num_preemptions(small)
    assert read(small, held_out_pages(NUM_PAGES))[0] == list(trained_answers())
    assert num_preemptions(small) > before


@torch.inference_mode()
def beams_of_reference(
    model: ReferenceNemotronParse, page: Page, prompt: list[int], width: int, num_new_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """The best sequences, prompt and all, where none ends; and the sums of their logprobs."""
    encoded = model.encoder(to_pixels(page.image)[None])
    beams, sums = [list(prompt)], torch.zeros(1)
    for _ in range(num_new_tokens):
        logits = model.decode(encoded.expand(len(beams), -1, -1), torch.tensor(beams))[:, -1]
        total = sums[:, None] + logits.log_softmax(-1)
        sums, places = total.flatten().topk(width)
        parents, tokens = places // total.shape[1], places % total.shape[1]
        beams = [[*beams[p], t] for p, t in zip(parents.tolist(), tokens.tolist())]
    return beams, sums.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_beams(llm, width):
    """All beams of a page share its encoder output: a beam that read another page's, or lost its
    place when beams change order, ends with other tokens."""
    tokenizer, num_new_tokens = make_tokenizer(), 12
    shape = Shape((PAGE_HEIGHT, PAGE_WIDTH), tokenizer.get_vocab_size())
    model = ReferenceNemotronParse(shape).load(FOLDER)
    pages = held_out_pages(3)
    prompts = [
        {"prompt": task, "multi_modal_data": {"image": page.image}} for page, task in pages
    ]
    params = BeamSearchParams(width, num_new_tokens, ignore_eos=True, length_penalty=0.0)
    for (page, task), output in zip(pages, llm.beam_search(prompts, params), strict=True):
        prompt = tokenizer.encode(task, add_special_tokens=False).ids
        wanted, sums = beams_of_reference(model, page, prompt, width, num_new_tokens)
        assert [sequence.tokens for sequence in output.sequences] == wanted
        if width > 1:
            made = [sequence.cum_logprob for sequence in output.sequences]
            torch.testing.assert_close(made, sums, rtol=1e-4, atol=1e-4)


def test_the_task_is_the_decoders_prompt(llm):
    """One image, two tasks: the text of a prompt must reach the decoder, whichever way it is
    written."""
    page = draw_page([("zebra", 1, 2), ("407", 3, 9)])
    texts = read(llm, [(page, WITH_BOXES), (page, TEXT_ALONE)])[1]
    assert texts == [page.answer(WITH_BOXES), page.answer(TEXT_ALONE)]
    ids = llm.get_tokenizer().encode(TEXT_ALONE, add_special_tokens=False)
    data = {"multi_modal_data": {"image": page.image}}
    prompts = [
        {"prompt": TEXT_ALONE, **data},
        {"prompt_token_ids": ids, **data},
        {"prompt": TEXT_ALONE.removeprefix("</s>"), **data},  # lacks the start token
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": TEXT_ALONE},
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": {"prompt_token_ids": ids}},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["zebra 407"] * len(prompts)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}


def test_an_image_of_another_size_is_fitted(llm):
    """What is smaller than the page is read where it stands in the middle of it."""
    page = draw_page([("409", 0, 0)])
    cut_out = page.image.crop((0, 0, 96, 32))  # lands on whole cells: 5 to the right, 1 down
    moved = draw_page([("409", 1, 5)])
    answers = read(llm, [(Page(cut_out, ()), WITH_BOXES)])[1]
    assert answers == [moved.answer(WITH_BOXES)]


def test_a_prompt_without_an_image_is_refused(llm):
    """And ends no other request."""
    with pytest.raises(ValueError, match="image"):
        llm.generate([WITH_BOXES], use_tqdm=False)
    page = draw_page([("fox", 2, 3)])
    assert read(llm, [(page, TEXT_ALONE)])[1] == ["fox"]


# Random models


def noise(rng: np.random.Generator, shape: Shape) -> Image.Image:
    """Squares of random colours: every patch is another."""
    rows, columns = shape.patches
    small = rng.integers(0, 256, (rows * 2, columns * 2, 3), dtype=np.uint8)
    return Image.fromarray(small.repeat(8, axis=0).repeat(8, axis=1))


def check_random(shape: Shape, folder: Path, lengths: Sequence[int], num_new_tokens: int) -> None:
    """Prompts of these lengths, each with an image of its own, together in chunks, then alone."""
    model = random_reference(shape)
    model.save(folder)
    pixels, ids = np.random.default_rng(0), random.Random(0)
    images = [noise(pixels, shape) for _ in lengths]
    prompts = [[2, *(ids.randrange(3, shape.vocab_size) for _ in range(n - 1))] for n in lengths]
    expected = [
        model.generate(to_pixels(image), prompt, num_new_tokens)
        for image, prompt in zip(images, prompts, strict=True)
    ]
    assert len(set(map(tuple, expected))) == len(lengths), "the model says one thing only"
    llm = make_llm(folder, skip_tokenizer_init=True, max_num_batched_tokens=32, max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    inputs = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"image": image}}
        for image, prompt in zip(images, prompts, strict=True)
    ]

    def run(some: list[dict]) -> list[list[int]]:
        outputs = llm.generate(some, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert run(inputs) == expected
    if len(inputs) > 1:
        llm.reset_prefix_cache()
        assert [run([one])[0] for one in inputs] == expected


@pytest.mark.parametrize(
    "shape",
    [
        # 7 patches in a row, of which the neck drops 3.
        Shape((32, 112), RANDOM_VOCABULARY, 48, 2, 3, 2.5, 256, 64, 3, 4, 80, 128),
        # Higher than wide; 16 encoder tokens and the summary; heads of another width.
        Shape((256, 64), RANDOM_VOCABULARY, 64, 3, 4, 4.0, 320, 48, 2, 3, 64, 128),
    ],
    ids=["left-over-columns", "upright"],
)
def test_random_model(shape, tmp_path):
    """Guards against a weight, a norm or a scale in the wrong place, and neighbours' images."""
    check_random(shape, tmp_path, lengths=(1, 5, 15, 16, 17, 40), num_new_tokens=12)


@pytest.mark.slow
@torch.inference_mode()
def test_a_page_of_the_real_size(tmp_path):
    """2048 x 1648 pixels, 3201 encoder tokens, heads of 80 and 64 as in the real one; narrower and
    with fewer layers, and one request, so that it takes seconds."""
    shape = Shape((2048, 1648), RANDOM_VOCABULARY, 160, 2, 2, 4.0, 2048, 128, 2, 2, 256, 128)
    assert shape.num_encoder_tokens == 3201
    check_random(shape, tmp_path, lengths=(5,), num_new_tokens=8)


@pytest.mark.slow
def test_example():
    """examples/nemotron_parse.py, as it stands in the documentation, reads the page beside it."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples" / "nemotron_parse.py"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "Text at (0.1250, 0.0000) to (0.4375, 0.2500): lemon",
        "Number at (0.4375, 0.5000) to (0.6875, 0.7500): 2718",
    ]

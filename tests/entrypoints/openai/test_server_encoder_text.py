# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a trained BART that reads dates, and the `openai` client that writes some."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.entrypoints.openai.test_server import ServerProcess
from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER
from vllm.tokenizers import get_tokenizer

pytestmark = pytest.mark.slow

DATES = examples(24, 5, held_out=True)
TEXT, DATE = "We met on 13.03.2016.", "2016-03-13"
IDS = get_tokenizer(FOLDER).encode(TEXT)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    started = ServerProcess("--model", str(FOLDER), "--max-model-len", "32")
    yield started
    started.stop()


def complete(server, prompt, **options):
    model = server.openai.models.list().data[0].id
    return server.openai.completions.create(model=model, prompt=prompt, **options)


def chat(server, content, **options):
    model = server.openai.models.list().data[0].id
    messages = [{"role": "user", "content": content}]
    return server.openai.chat.completions.create(model=model, messages=messages, **options)


def test_all_forms_of_a_prompt_are_the_encoders_text(server):
    """Fault: the text is taken for the decoder's prompt, or the defaults of the model's
    generation_config.json (greedy, forced tokens) are not heeded."""
    parts = [{"type": "text", "text": TEXT}]
    completions = [complete(server, prompt) for prompt in (TEXT, IDS, parts)]
    assert [made.choices[0].text for made in completions] == [DATE] * 3
    assert {made.choices[0].finish_reason for made in completions} == {"stop"}
    usage = completions[0].usage
    assert usage.prompt_tokens == len(IDS) + 2 and usage.completion_tokens == 11
    assert chat(server, TEXT).choices[0].message.content == DATE
    stream = complete(server, TEXT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == DATE


def test_many_at_once_are_right(server):
    """Fault: one request's answer is made of another's encoder output."""
    texts, dates = zip(*DATES, strict=True)
    with ThreadPoolExecutor(12) as pool:
        alone = list(pool.map(lambda text: chat(server, text).choices[0].message.content, texts))
    together = [choice.text for choice in complete(server, list(texts)).choices]
    assert alone == together
    assert sum(a == b for a, b in zip(alone, dates, strict=True)) >= len(dates) - 2


def test_several_choices_of_one_text(server):
    made = complete(server, TEXT, n=3, temperature=0.7, seed=1)
    assert len(made.choices) == 3 and DATE in {choice.text for choice in made.choices}


def test_what_is_wrong_hurts_its_own_request_only(server):
    for prompt, message in [
        ("word " * 300, "this model's encoder takes at most 256"),
        ([512], "out of range"),
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "supported: text"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            complete(server, prompt)
    assert complete(server, TEXT).choices[0].text == DATE

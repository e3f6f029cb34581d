# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a model that reads images, and the `openai` client that shows it some."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from PIL import Image

from tests.entrypoints.openai.test_server import KEY, ServerProcess
from tests.models.nemotron_parse.pages import TEXT_ALONE, WITH_BOXES, Page, draw_page
from tests.models.nemotron_parse.trained import FOLDER

pytestmark = pytest.mark.slow

PAGES = [
    draw_page([("zebra", 0, 3)]),
    draw_page([("2718", 1, 9), ("king", 3, 0)]),
    draw_page([("fox", 2, 5)], grey=60),
    draw_page([("31", 0, 12), ("lemon", 2, 2)]),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    started = ServerProcess(str(FOLDER), "--served-model-name", "parse", "--max-model-len", "128")
    yield started
    started.stop()


def data_url(image: Image.Image, form: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, form, quality=95)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def content(url: str, task: str = WITH_BOXES) -> list[dict]:
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": task},
    ]


def ask(server: ServerProcess, url: str, task: str = WITH_BOXES, **options):
    return server.openai.chat.completions.create(
        model="parse",
        messages=[{"role": "user", "content": content(url, task)}],
        temperature=0,
        max_completion_tokens=64,
        **options,
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_chat(server, form):
    """An image in, the right text out; the usage counts the encoder's tokens and the decoder's."""
    answer = ask(server, data_url(PAGES[1].image, form))
    (choice,) = answer.choices
    assert choice.message.content == PAGES[1].answer(WITH_BOXES)
    assert choice.finish_reason == "stop" and answer.usage.prompt_tokens == 17 + 5
    answer = ask(server, data_url(PAGES[1].image, form), TEXT_ALONE)
    assert answer.choices[0].message.content == "2718 king"


def test_chat_streams(server):
    chunks = ask(server, data_url(PAGES[0].image), stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(pieces) > 3 and "".join(pieces) == PAGES[0].answer(WITH_BOXES)


def test_completion(server):
    """A prompt of content parts, which the client sends as it is."""
    answer = server.openai.completions.create(
        model="parse",
        prompt=[],
        extra_body={"prompt": content(data_url(PAGES[2].image))},
        temperature=0,
        max_tokens=64,
    )
    assert answer.choices[0].text == PAGES[2].answer(WITH_BOXES)


def test_many_at_once(server):
    """Each gets the text of its own image."""
    pages: list[Page] = PAGES * 4
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda page: ask(server, data_url(page.image)), pages)
        texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [page.answer(WITH_BOXES) for page in pages]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,AAAA", "image"),
        ("data:text/plain;base64,AAAA", "image"),
        ("http://127.0.0.1:1/page.png", "allowed-media-domains|not allowed|127.0.0.1"),
        ("file:///etc/passwd", "file|scheme|data:"),
    ],
)
def test_what_is_no_image_is_answered_with_400(server, url, reason):
    """And the server reads the next one."""
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(server, url)
    assert ask(server, data_url(PAGES[2].image), TEXT_ALONE).choices[0].message.content == "fox"


@pytest.mark.parametrize("messages", [[], ["no image"], ["two images"]])
def test_one_image_in_a_prompt(server, messages):
    """None and two are refused by name; a request ends, and no other."""
    image = {"type": "image_url", "image_url": {"url": data_url(PAGES[0].image)}}
    parts = [image] * 2 if messages == ["two images"] else []
    body = [{"role": "user", "content": [*parts, {"type": "text", "text": WITH_BOXES}]}]
    with pytest.raises(openai.BadRequestError, match="image" if messages else "messages"):
        server.openai.chat.completions.create(model="parse", messages=body if messages else [])


def test_example(server):
    """examples/nemotron_parse_client.py, as README has it, reads the page beside it."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "nemotron_parse_client.py"), f"{server.url}/v1"],
        capture_output=True, text=True, timeout=300, env={"VLLM_API_KEY": KEY, "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lemon" in done.stdout and "2718" in done.stdout

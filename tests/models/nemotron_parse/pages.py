# SPDX-License-Identifier: Apache-2.0
"""Small pages with rendered words and numbers, what a reader should say of them, and the tokenizer
of those answers.

An answer is written as Nemotron Parse writes it: for each text its box's upper left corner, the
text, the lower right corner and a class. Corners are fractions of the page, rounded to a grid.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

PAGE_HEIGHT, PAGE_WIDTH = 64, 256
# A character a cell, as a typewriter sets them; cells are RADIO's patches, so that little training
# is enough.
CELL = 16
FONT_SIZE, BASELINE = 15, 12
MAX_DIGITS = 6

WITH_BOXES = "</s><s><predict_bbox><predict_classes><output_markdown>"
TEXT_ALONE = "</s><s><no_bbox><no_classes><output_plain>"

WORDS = (
    "apple bread candle dinner engine forest garden hammer island jacket kettle ladder market "
    "needle orange pencil quartz rabbit saddle ticket umbrella velvet window yellow zebra bridge "
    "cloud dream eagle flower grape honey ivory juice knife lemon mango night ocean piano queen "
    "river stone tiger unit violin water xenon youth zero black white green brown copper silver "
    "north south east west one two three four five six seven eight nine ten king box fox jump lazy"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
START, PAD, END, UNKNOWN = "<s>", "<pad>", "</s>", "<unk>"
TASKS = (
    "<predict_bbox>",
    "<predict_classes>",
    "<output_markdown>",
    "<output_plain>",
    "<output_no_text>",
    "<no_bbox>",
    "<no_classes>",
)
CLASSES = ("<class_Text>", "<class_Number>")


@dataclass(frozen=True)
class PlacedText:
    """A text and its box in pixels, edges on the grid, right and lower edge outside."""

    text: str
    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True)
class Page:
    image: Image.Image
    texts: tuple[PlacedText, ...]

    def answer(self, task: str) -> str:
        """What a reader says to a task prompt, without the end token."""
        if task == TEXT_ALONE:
            return " ".join(item.text for item in self.texts)
        return "".join(_with_box(item) for item in self.texts)

    def letters(self) -> list[int]:
        """What is in each cell, row by row: an index into LETTERS, which ends with the blank."""
        columns = PAGE_WIDTH // CELL
        cells = [LETTERS.index(" ")] * (PAGE_HEIGHT // CELL * columns)
        for item in self.texts:
            first = item.top // CELL * columns + item.left // CELL
            cells[first : first + len(item.text)] = map(LETTERS.index, item.text)
        return cells

    def starts(self) -> list[int]:
        """In which column each row's text begins; one past the last where a row has none."""
        starts = [PAGE_WIDTH // CELL] * (PAGE_HEIGHT // CELL)
        for item in self.texts:
            starts[item.top // CELL] = item.left // CELL
        return starts


def x_token(pixels: int) -> str:
    return f"<x_{pixels / PAGE_WIDTH:.4f}>"


def y_token(pixels: int) -> str:
    return f"<y_{pixels / PAGE_HEIGHT:.4f}>"


def _with_box(item: PlacedText) -> str:
    kind = CLASSES[1] if item.text.isdigit() else CLASSES[0]
    return (
        f"{x_token(item.left)}{y_token(item.top)}{item.text}"
        f"{x_token(item.right)}{y_token(item.bottom)}{kind}"
    )


@cache
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(FONT_SIZE)


def random_text(rng: random.Random) -> str:
    """A word of the list, or a number that may never have been seen before."""
    if rng.random() < 0.5:
        return rng.choice(WORDS)
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, MAX_DIGITS)))


def draw_page(placed: list[tuple[str, int, int]], grey: int = 0) -> Page:
    """A white page with each (text, row, column of its first character) typed in a shade of
    grey."""
    image = Image.new("RGB", (PAGE_WIDTH, PAGE_HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    texts = []
    for text, row, column in placed:
        left, top = column * CELL, row * CELL
        for index, letter in enumerate(text):
            center = left + index * CELL + CELL // 2
            draw.text((center, top + BASELINE), letter, (grey,) * 3, _font(), anchor="ms")
        texts.append(PlacedText(text, left, top, left + len(text) * CELL, top + CELL))
    return Page(image, tuple(texts))


def random_page(rng: random.Random) -> Page:
    """One or two texts, each in a row of its own."""
    placed = []
    for row in sorted(rng.sample(range(PAGE_HEIGHT // CELL), rng.randint(1, 2))):
        text = random_text(rng)
        placed.append((text, row, rng.randint(0, PAGE_WIDTH // CELL - len(text))))
    return draw_page(placed, grey=rng.randint(0, 80))


def make_tokenizer() -> Tokenizer:
    """Characters, boxes, classes and tasks. By itself it puts `<s>` and `</s>` around a text, as
    the real one does, which prompts must not get."""
    vocabulary = {token: index for index, token in enumerate((START, PAD, END, UNKNOWN))}
    for letter in LETTERS:
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    special = [START, PAD, END, UNKNOWN, *TASKS]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    boxes = [x_token(x) for x in range(0, PAGE_WIDTH + 1, CELL)]
    boxes += [y_token(y) for y in range(0, PAGE_HEIGHT + 1, CELL)]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in (*boxes, *CLASSES)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(t, vocabulary[t]) for t in (START, END)]
    )
    return tokenizer

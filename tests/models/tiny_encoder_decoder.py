# SPDX-License-Identifier: Apache-2.0
"""A tiny random BART, made by Transformers, and what it generates with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from vllm import LLM, SamplingParams

VOCAB_SIZE = 131
START, BOS = 2, 0
MAX_ENCODER_LEN = 96


def make_bart(folder: Path, **changes) -> Path:
    """Writes the checkpoint; `changes` to its config."""
    from transformers import BartConfig, BartForConditionalGeneration

    fields = dict(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=MAX_ENCODER_LEN,
        init_std=0.2,
        pad_token_id=1,
        bos_token_id=BOS,
        eos_token_id=START,
        decoder_start_token_id=START,
        # Tied ones say each token after itself for ever.
        tie_word_embeddings=False,
    )
    torch.manual_seed(2)
    BartForConditionalGeneration(BartConfig(**{**fields, **changes})).save_pretrained(folder)
    return folder


def random_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Token ids that are no special tokens, a list for each length."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@cache
def _reference(folder: str):
    from transformers import BartForConditionalGeneration

    return BartForConditionalGeneration.from_pretrained(folder).eval()


def generate(
    folder: Path, texts: Sequence[list[int]], prompts: Sequence[list[int]], num_new_tokens: int
) -> list[list[int]]:
    """Greedily, by Transformers, in float32: encoder tokens and decoder prompt of each request."""
    made = []
    for text, prompt in zip(texts, prompts, strict=True):
        ids = _reference(str(folder)).generate(
            torch.tensor([text]),
            decoder_input_ids=torch.tensor([prompt]),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            num_beams=1,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
            eos_token_id=None,
        )
        made.append(ids[0, len(prompt) :].tolist())
    return made


def enc_dec_prompts(texts: Sequence[list[int]], prompts: Sequence[list[int]]) -> list[dict]:
    """What `LLM.generate` takes."""
    return [
        {
            "encoder_prompt": {"prompt_token_ids": [], "multi_modal_data": {"text": text}},
            "decoder_prompt": {"prompt_token_ids": prompt},
        }
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def make_llm(folder: Path, **engine_args) -> LLM:
    """Token ids in and out, float32."""
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        **{"dtype": "float32", "generation_config": "vllm", **engine_args},
    )


def run(
    llm: LLM, texts: Sequence[list[int]], prompts: Sequence[list[int]], num_new_tokens: int
) -> list[list[int]]:
    """Greedily, by the engine, all requests at once."""
    sampling = SamplingParams(
        temperature=0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(enc_dec_prompts(texts, prompts), sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]

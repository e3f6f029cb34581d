# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, made by Transformers, and what it generates with them: float32,
greedy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

VOCAB_SIZE = 131
NUM_NEW_TOKENS = 8
MAX_MODEL_LEN = 96
# Around a page of 16 tokens, and longer than the window.
PROMPT_LENGTHS = (7, 17, 33)
TEXT_LENGTHS = (5, 16, 21)
ARCHITECTURES = {
    "decoder": "LlamaForCausalLM",
    "hybrid": "Gemma3ForCausalLM",
    "encoder-decoder": "BartForConditionalGeneration",
}
# Heads of 32: the least that all known kernels take.
_DECODER = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
)
_WINDOW = dict(
    query_pre_attn_scalar=24,
    sliding_window=11,
    layer_types=["sliding_attention", "full_attention"],
)
_BART = dict(
    vocab_size=VOCAB_SIZE,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=MAX_MODEL_LEN,
    init_std=0.2,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    tie_word_embeddings=False,
)
# Else random branches drown the tokens, and one token is said for ever.
_BART_BRANCHES = 0.3


@dataclass(frozen=True)
class Request:
    """Token ids of the prompt and, of an encoder-decoder model, of the encoder's text."""

    prompt: list[int]
    text: list[int] | None = None


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint, requests, and the tokens that Transformers says to each."""

    folder: Path
    requests: list[Request]
    expected: list[list[int]]

    def probe(self, num_tokens: int) -> Request:
        """One of so many tokens, also of the encoder's text."""
        last = self.requests[-1]
        text = None if last.text is None else last.text[:num_tokens]
        return Request(last.prompt[:num_tokens], text)


@cache
def make_model(kind: str, folder: Path) -> TinyModel:
    """kind: of `ARCHITECTURES`; folder: of all checkpoints."""
    torch.manual_seed(2)
    model = _make(kind).eval()
    model.save_pretrained(folder / kind)
    requests = _requests(kind)
    return TinyModel(folder / kind, requests, [_generate(model, one) for one in requests])


def _make(kind: str) -> torch.nn.Module:
    import transformers

    if kind == "decoder":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))
    if kind == "hybrid":
        config = transformers.Gemma3TextConfig(**_DECODER, **_WINDOW)
        return transformers.Gemma3ForCausalLM(config)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                weight *= _BART_BRANCHES
    return model


def _requests(kind: str) -> list[Request]:
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    if kind != "encoder-decoder":
        return [Request(ids(length)) for length in PROMPT_LENGTHS]
    starts = [_BART["decoder_start_token_id"]], [2, 0], [2, *ids(16)]
    return [Request(list(start), ids(n)) for start, n in zip(starts, TEXT_LENGTHS)]


@torch.inference_mode()
def _generate(model: torch.nn.Module, request: Request) -> list[int]:
    """Token by token, without any of Transformers' options of generation."""
    said: list[int] = []
    for _ in range(NUM_NEW_TOKENS):
        ids = torch.tensor([request.prompt + said])
        if request.text is None:
            logits = model(ids).logits
        else:
            logits = model(torch.tensor([request.text]), decoder_input_ids=ids).logits
        said.append(int(logits[0, -1].argmax()))
    return said

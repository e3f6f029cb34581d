# SPDX-License-Identifier: Apache-2.0
"""Real models whose prompts one engine computes and another goes on with: token for token what one
engine gives, 32 requests at once, cached and not; the bytes that moved are those the tokens own.
"""

from __future__ import annotations

import random

import pytest
from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER
from tests.models.smollm2 import make_prompts, model_path
from tests.models.tiny import NATIVE, VOCAB_SIZE, make_model
from tests.models.tiny_encoder_decoder import BOS, START
from tokenizers import Tokenizer
from transformers import BartConfig

from tests.distributed.kv_transfer.nixl.engine_host import Request, Setup
from tests.distributed.kv_transfer.nixl.engine_pairs import (
    Geometry,
    Span,
    bytes_owned,
    make_pair,
    same_answers,
)
from vllm.tokenizers.registry import get_tokenizer
from vllm.triton_utils import HAS_TRITON

pytest.importorskip("nixl")
pytestmark = pytest.mark.slow
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"
)

NUM_REQUESTS, NUM_NEW_TOKENS = 32, 6
FULL, CROSS = "full_attention", "cross_attention"


def check(pair, setup, here, there, requests, token_bytes, num_new_tokens=NUM_NEW_TOKENS) -> None:
    """`token_bytes`: of all layers of a kind."""
    decode, _ = pair.made(pair.decode, setup, here)
    expected = pair.decode.run(decode, requests, num_new_tokens)
    rounds = pair.transfer(setup, here, there, requests, num_new_tokens)
    own = [len(request.prompt) for request in requests]
    cross = [Span(len(request.text)) for request in requests if request.text]
    starts = [0] * len(own), [(n - 1) // here.page * here.page for n in own]
    for answers, start, texts in zip(rounds, starts, (cross, [])):
        same_answers(answers, expected)
        spans = {FULL: [Span(*each) for each in zip(own, start)], CROSS: texts}
        assert answers.num_read == len(requests)
        assert answers.bytes_read == sum(
            bytes_owned(kind, nbytes, here, there, spans[kind])
            for kind, nbytes in token_bytes.items()
        )


def smollm2() -> tuple[Setup, list[Request]]:
    prompts = make_prompts(get_tokenizer(model_path()))
    # Each begins otherwise, so that none finds another's pages; a few tokens, so that it goes fast.
    distinct = list({tuple(ids[:16]): ids[:35] for ids in prompts}.values())[:NUM_REQUESTS]
    assert len(distinct) == NUM_REQUESTS
    engine_args = dict(
        dtype="float32", max_model_len=64, max_num_seqs=NUM_REQUESTS, kv_cache_memory_bytes=200 << 20
    )
    return Setup(model_path(), engine_args), [Request(ids) for ids in distinct]


SMOLLM2_BYTES = {FULL: 30 * 2 * 3 * 64 * 4}


def test_smollm2(tmp_path):
    """On the CPU platform."""
    setup, requests = smollm2()
    here, there = (Geometry.of(page, full_attention="CPU_ATTN") for page in (16, 32))
    with make_pair(tmp_path / "site", package=None) as pair:
        check(pair, setup, here, there, requests, SMOLLM2_BYTES)


@needs_triton
def test_smollm2_between_layouts(tmp_path):
    """K/V-first into blocks-first HND with r = 4 and pages of twice the size."""
    setup, requests = smollm2()
    first = Geometry.of(16, full_attention="ROCM_ATTN")
    other = Geometry.of(32, 8, full_attention="TRITON_ATTN HND")
    with make_pair(tmp_path / "site") as pair:
        check(pair, setup, other, first, requests, SMOLLM2_BYTES)


@needs_triton
def test_trained_bart(tmp_path):
    """Both groups travel: self-attention over the decoder's prompt, cross-attention over the text.
    Guards against an encoder that runs again, and cross-attention pages of somebody else."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text, _ in examples(NUM_REQUESTS, 2, held_out=True)]
    assert len({tuple(text) for text in texts}) == NUM_REQUESTS
    requests = [Request([START, BOS], text) for text in texts]
    engine_args = dict(dtype="float32", max_num_seqs=NUM_REQUESTS, kv_cache_memory_bytes=32 << 20)
    with make_pair(tmp_path / "site") as pair:
        mixed = Geometry.of(16, full_attention="ROCM_ATTN", cross_attention="TRITON_ATTN HND")
        fused = Geometry.of(32, 8, full_attention="CPU_ATTN", cross_attention="TORCH_ATTN")
        setup = Setup(str(FOLDER), engine_args)
        config = BartConfig.from_pretrained(FOLDER)
        token_bytes = config.decoder_layers * 2 * config.d_model * 4
        for here, there in ((mixed, mixed), (mixed, fused), (fused, mixed)):
            check(pair, setup, here, there, requests, dict.fromkeys((FULL, CROSS), token_bytes))


@needs_triton
def test_with_kernels_of_triton(tmp_path):
    """What the kernels wrote there is what they read here: K/V-first, and HND with r = 2."""
    rng = random.Random(0)
    make_model(NATIVE["llama"], tmp_path / "llama")
    setup = Setup(
        str(tmp_path / "llama"),
        dict(dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 20),
    )
    requests = [Request([rng.randrange(3, VOCAB_SIZE) for _ in range(n)]) for n in (5, 16, 33)]
    first = Geometry.of(16, full_attention="ROCM_ATTN")
    other = Geometry.of(32, 16, full_attention="TRITON_ATTN HND")
    with make_pair(tmp_path / "site", in_torch=False) as pair:
        for here, there in ((other, first), (first, other)):
            check(pair, setup, here, there, requests, {FULL: 3 * 2 * 2 * 8 * 4}, 4)

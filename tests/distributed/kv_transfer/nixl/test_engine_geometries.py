# SPDX-License-Identifier: Apache-2.0
"""What one engine computed of prompts another goes on with, over real NIXL, for every pair of
geometries that engines can be brought to have here: token for token what one engine gives, 32
requests at once, with and without a part in the prefix cache; the bytes that moved, by the metrics,
are those the tokens own. Guards against pages that are taken for others of a group or a layer, read
twice, read in part or read for nothing.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.models.tiny import NATIVE, Family, make_model
from tests.models.tiny_encoder_decoder import START, make_bart

from tests.distributed.kv_transfer.nixl.engine_host import Answers, Request, Setup
from tests.distributed.kv_transfer.nixl.engine_pairs import (
    LAYOUTS,
    Geometry,
    Pair,
    Span,
    bytes_owned,
    make_pair,
    same_answers,
)
from vllm.triton_utils import HAS_TRITON

pytest.importorskip("nixl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install vllm[triton]"),
]

NUM_REQUESTS, NUM_NEW_TOKENS = 32, 3
VOCAB_SIZE = 131
KV_HEADS, HEAD_SIZE, NUM_LAYERS = 2, 4, 2
ENGINE_ARGS = dict(
    dtype="float32",
    max_model_len=128,
    max_num_seqs=NUM_REQUESTS,
    max_num_batched_tokens=2048,
    kv_cache_memory_bytes=4 << 20,
)
# Here and there: tokens of a page, and of a kernel block if it is less.
PAGINGS = [
    ((16, 0), (16, 0)),
    ((16, 0), (32, 0)),
    ((32, 0), (16, 0)),
    ((32, 8), (16, 0)),
    ((16, 0), (32, 8)),
]
FULL, SLIDING, CROSS = "full_attention", "sliding_window", "cross_attention"


def token_ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def lengths(rng: random.Random, longest: int) -> list[int]:
    """Around the ends of pages and kernel blocks, and any others."""
    some = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65]
    some = [n for n in some if n <= longest]
    return some + [rng.randint(1, longest) for _ in range(NUM_REQUESTS - len(some))]


def is_whole(answers: Answers) -> None:
    assert answers.num_read == NUM_REQUESTS
    assert set(answers.finish_reasons) == {"length"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with make_pair(tmp_path_factory.mktemp("pair") / "site") as made:
        yield made


class Case:
    """A model, requests, and what one engine alone makes of them."""

    def __init__(self, pair: Pair, folder, requests: list[Request], geometry: Geometry) -> None:
        self.setup = Setup(str(folder), ENGINE_ARGS)
        self.requests = requests
        name, _ = pair.made(pair.prefill, self.setup, geometry)
        self.expected = pair.prefill.run(name, requests, NUM_NEW_TOKENS)
        assert len({tuple(tokens) for tokens in self.expected.tokens}) > NUM_REQUESTS // 2
        assert self.expected.bytes_read == 0

    def check(self, pair: Pair, here: Geometry, there: Geometry) -> list[int]:
        """Bytes of each round."""
        rounds = pair.transfer(self.setup, here, there, self.requests, NUM_NEW_TOKENS)
        for answers in rounds:
            same_answers(answers, self.expected)
            is_whole(answers)
            # All but the last token of a prompt: that is computed again, for the next one.
            assert answers.num_cached == [len(each.prompt) - 1 for each in self.requests]
        return [answers.bytes_read for answers in rounds]


# One group

ONE_GROUP = [
    tuple(Geometry.of(*paging, full_attention=layout) for paging, layout in zip(pagings, layouts))
    for layouts in itertools.product(LAYOUTS, LAYOUTS)
    for pagings in PAGINGS
]


@pytest.fixture(scope="module")
def llama(pair, tmp_path_factory) -> Case:
    rng = random.Random(0)
    config = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model(Family("llama", config), folder)
    requests = [Request(token_ids(rng, n)) for n in lengths(rng, 80)]
    return Case(pair, folder, requests, Geometry.of(full_attention="CPU_ATTN"))


@pytest.mark.parametrize(("here", "there"), ONE_GROUP, ids=str)
def test_every_pair_of_geometries(pair, llama, here, there):
    token_bytes = NUM_LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4
    prompts = [len(request.prompt) for request in llama.requests]
    cold = [Span(n) for n in prompts]
    # The last token is computed in any case, so a prompt's last page is looked for in vain.
    warm = [Span(n, (n - 1) // here.page * here.page) for n in prompts]
    assert llama.check(pair, here, there) == [
        bytes_owned(FULL, token_bytes, here, there, spans) for spans in (cold, warm)
    ]


# Two groups over one allocation: self-attention and cross-attention

BART_HEADS, BART_HEAD_SIZE, BART_LAYERS = 2, 16, 2
BART_TOKEN_BYTES = BART_LAYERS * 2 * BART_HEADS * BART_HEAD_SIZE * 4
MIXES = [
    ("ROCM_ATTN", "TRITON_ATTN"),
    ("ROCM_ATTN", "TRITON_ATTN HND"),
    ("ROCM_ATTN", "CPU_ATTN"),
    ("ROCM_ATTN", "TORCH_ATTN"),
    ("TRITON_ATTN", "TRITON_ATTN"),
    ("TRITON_ATTN HND", "TORCH_ATTN"),
    ("CPU_ATTN", "CPU_ATTN"),
]
TWO_GROUPS = [
    tuple(
        Geometry.of(*paging, full_attention=own, cross_attention=cross)
        for paging, (own, cross) in zip(pagings, mixes)
    )
    for mixes in itertools.product(MIXES, MIXES)
    for pagings in (PAGINGS[0], PAGINGS[3])
]


@pytest.fixture(scope="module")
def bart(pair, tmp_path_factory) -> Case:
    rng = random.Random(1)
    folder = make_bart(tmp_path_factory.mktemp("models") / "bart", max_position_embeddings=128)
    both = zip(lengths(rng, 80), rng.sample(lengths(rng, 65), NUM_REQUESTS))
    requests = [Request([START, *token_ids(rng, n - 1)], token_ids(rng, m)) for n, m in both]
    plain = Geometry.of(full_attention="CPU_ATTN", cross_attention="CPU_ATTN")
    return Case(pair, folder, requests, plain)


@pytest.mark.parametrize(("here", "there"), TWO_GROUPS, ids=str)
def test_every_pair_of_encoder_decoder_geometries(pair, bart, here, there):
    """K/V-first self-attention beside cross-attention of each layout, and the rest. What was kept
    of a text is found again whole, so that nothing of it is read."""
    own = [len(request.prompt) for request in bart.requests]
    cross = [len(request.text) for request in bart.requests]
    warm = [Span(n, (n - 1) // here.page * here.page) for n in own]
    pair_bytes = [
        bytes_owned(FULL, BART_TOKEN_BYTES, here, there, spans)
        for spans in ([Span(n) for n in own], warm)
    ]
    pair_bytes[0] += bytes_owned(CROSS, BART_TOKEN_BYTES, here, there, [Span(n) for n in cross])
    assert bart.check(pair, here, there) == pair_bytes


@pytest.mark.parametrize("cross", ["TRITON_ATTN", "TRITON_ATTN HND"])
def test_a_mixed_aligned_allocation_on_both_ends(pair, bart, cross):
    """K/V-first self-attention, restrided cross-attention: a page is two runs in each allocation, the
    same for both groups, on both ends; one region for each allocation."""
    geometry = Geometry.of(full_attention="ROCM_ATTN", cross_attention=cross)
    for host in (pair.prefill, pair.decode):
        _, made = pair.made(host, bart.setup, geometry)
        assert set(made.backends.values()) == {"ROCM_ATTN", "TRITON_ATTN"}
        assert len(made.region_bytes) == BART_LAYERS
        own, crossed = made.runs
        assert own == crossed and len(own) == 2 * BART_LAYERS
        half = 16 * BART_TOKEN_BYTES // BART_LAYERS // 2
        assert [nbytes for _, nbytes in own] == [half] * 4
        (key, _), (value, _) = own[:2]
        assert value - key == made.region_bytes[0] // 2


# Hybrid: full attention beside windows, each with kernel blocks of its own

WINDOW, GEMMA_HEADS, GEMMA_HEAD_SIZE = 21, 2, 16
NUM_GEMMA_LAYERS = {FULL: 2, SLIDING: 4}


def hybrid(full: str, sliding: str, page: int = 16, block: int = 0) -> Geometry:
    """`block`: of the window's backend alone."""
    blocks = ((sliding.split()[0], block),) if block else ()
    return Geometry(((FULL, full), (SLIDING, sliding)), page, blocks)


HYBRIDS = [
    hybrid("CPU_ATTN", "TORCH_ATTN", 16, 4),
    hybrid("ROCM_ATTN", "TRITON_ATTN", 16, 4),
    hybrid("TRITON_ATTN HND", "CPU_ATTN", 32, 8),
    hybrid("CPU_ATTN", "CPU_ATTN"),
    hybrid("TORCH_ATTN", "ROCM_ATTN", 32),
]


@pytest.fixture(scope="module")
def gemma3(pair, tmp_path_factory) -> Case:
    rng = random.Random(2)
    folder = tmp_path_factory.mktemp("models") / "gemma3"
    make_model(NATIVE["gemma3"], folder)
    requests = [Request(token_ids(rng, n)) for n in lengths(rng, 110)]
    return Case(pair, folder, requests, hybrid("CPU_ATTN", "CPU_ATTN"))


def window_begin(num_tokens: int, page: int) -> int:
    """First token of the first page in which the window before the prompt's last token lies."""
    return max(0, num_tokens - WINDOW) // page * page


def cached_prefix(num_tokens: int, page: int) -> int:
    """What the prefix cache has of a prompt that was read once: a prefix before whose end lie all
    tokens of a window."""
    hit, begin = (num_tokens - 1) // page * page, window_begin(num_tokens, page)
    return hit if begin == 0 or (hit - WINDOW + 1) // page * page >= begin else 0


@pytest.mark.parametrize(
    ("here", "there"),
    [pair for pair in itertools.product(HYBRIDS, HYBRIDS) if pair[1].page % pair[0].page == 0],
    ids=str,
)
def test_groups_of_unequal_ratios(pair, gemma3, here, there):
    """Gemma 3: full attention with r = 1, windows with r = 4. Of a window's group only pages in the
    window travel."""
    for host, geometry in ((pair.decode, here), (pair.prefill, there)):
        _, made = pair.made(host, gemma3.setup, geometry)
        ratio = geometry.page // geometry.block(SLIDING)
        assert made.r == [ratio, ratio, 1]
    prompts = [len(request.prompt) for request in gemma3.requests]
    hits = [cached_prefix(n, here.page) for n in prompts]
    begins = [window_begin(n, here.page) for n in prompts]
    rounds = []
    for cached in ([0] * len(prompts), hits):
        spans = {
            FULL: [Span(n, hit) for n, hit in zip(prompts, cached)],
            SLIDING: [Span(n, max(both)) for n, *both in zip(prompts, cached, begins)],
        }
        rounds.append(
            sum(
                bytes_owned(kind, num * 2 * GEMMA_HEADS * GEMMA_HEAD_SIZE * 4, here, there, spans[kind])
                for kind, num in NUM_GEMMA_LAYERS.items()
            )
        )
    assert gemma3.check(pair, here, there) == rounds


ONE_GROUP_OPTION = {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize(
    ("here", "there", "one_group", "words"),
    [
        (HYBRIDS[3], HYBRIDS[3], "there", "several groups here are one of the peer's"),
        (HYBRIDS[3], HYBRIDS[3], "here", "are in groups [0, 1, 2] of the peer's"),
        (HYBRIDS[4], HYBRIDS[0], "", "--block-size that divides 16"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_name(pair, gemma3, here, there, one_group, words):
    """The hash is the same; after the exchange the pair is refused, and the requests end. One end
    manages windows apart and the other does not, or pages that have left a window there could be
    parts of one that has not here."""
    setup, apart = gemma3.setup, replace(gemma3.setup, engine_args=ENGINE_ARGS | ONE_GROUP_OPTION)
    prefill, _ = pair.made(pair.prefill, apart if one_group == "there" else setup, there)
    decode, _ = pair.made(pair.decode, apart if one_group == "here" else setup, here)
    first = pair.prefill.run(prefill, gemma3.requests[:2], 1, keep=True)
    told = zip(gemma3.requests, first.kv_transfer_params)
    asked = [replace(request, kv_transfer_params=params) for request, params in told]
    refused = pair.decode.run(decode, asked, NUM_NEW_TOKENS)
    assert refused.num_read == 0 and not any(refused.tokens), refused.finish_reasons
    assert words in pair.decode.log
    assert not pair.decode.settle(decode)["receives"]
    alone = pair.decode.run(decode, gemma3.requests, NUM_NEW_TOKENS)
    same_answers(alone, gemma3.expected)

# SPDX-License-Identifier: Apache-2.0
"""The search itself, over a made-up model whose best sequences are known by trying all of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.beam_groups import BeamGroups
from vllm.v1.engine.beam_search import BeamSearch, Candidates

EOS = 0
VOCAB_SIZE = 4


class ToyModel:
    """Logprobs of the next token that depend on the whole sequence, the same each time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logprobs(self, tokens: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self._seed, len(tokens), *tokens])
        logits = rng.normal(scale=2.0, size=VOCAB_SIZE)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def candidates(self, tokens: tuple[int, ...], count: int) -> Candidates:
        logprobs = self.logprobs(tokens)
        order = np.argsort(-logprobs)[:count]
        return Candidates(order.astype(np.int32), logprobs[order])


def search(model: ToyModel, params: BeamSearchParams, **more) -> BeamSearch:
    made = BeamSearch(params, params.max_tokens, frozenset({EOS}), **more)
    while not made.is_done:
        made.advance(
            [model.candidates(tuple(b.token_ids()), made.num_candidates) for b in made.running]
        )
    return made


def all_sequences(model: ToyModel, max_tokens: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every sequence that ends, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=length):
            if EOS in tokens[:-1] or (length < max_tokens and tokens[-1] != EOS):
                continue
            steps = [model.logprobs(tokens[:i])[token] for i, token in enumerate(tokens)]
            found.append((float(sum(steps)), tokens))
    return sorted(found, reverse=True)


@given(seed=st.integers(0, 10_000), early_stopping=st.sampled_from([False, "never"]))
def test_wide_enough_finds_the_best(seed, early_stopping):
    """With as many beams as there are sequences nothing is lost: the best of all is found. Scores
    are plain sums here, of which stopping early loses none."""
    model = ToyModel(seed)
    params = BeamSearchParams(64, 4, length_penalty=0.0, early_stopping=early_stopping)
    found = [(f.score, tuple(f.beam.token_ids())) for f in search(model, params).finished]
    wanted = all_sequences(model, 4)[: len(found)]
    assert len(found) == 64
    np.testing.assert_allclose([s for s, _ in found], [s for s, _ in wanted], rtol=1e-5)
    assert found[0][1] == wanted[0][1]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(2, 5),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_what_it_gives_back(seed, width, length_penalty, early_stopping):
    """As many sequences as beams, all different, best first, each of which has ended; a score is the
    sum of the logprobs that are told, over the length as the penalty says."""
    model = ToyModel(seed)
    params = BeamSearchParams(
        width, 6, length_penalty=length_penalty, early_stopping=early_stopping
    )
    made = search(model, params, num_counted_before=1, num_told=2)
    sequences = [tuple(f.beam.token_ids()) for f in made.finished]
    assert len(set(sequences)) == width
    assert made.finished == sorted(made.finished, key=lambda each: -each.score)
    for score, beam in made.finished:
        tokens = beam.token_ids()
        assert EOS not in tokens[:-1]
        assert made.ends_with_stop_token(beam) == (tokens[-1] == EOS)
        assert tokens[-1] == EOS or len(tokens) == 6
        rows = made.logprobs_of(beam)
        assert rows.logprob_token_ids[:, 0].tolist() == tokens
        assert rows.logprobs.shape == (len(tokens), 3)
        total = sum(model.logprobs(tuple(tokens[:i]))[t] for i, t in enumerate(tokens))
        np.testing.assert_allclose(rows.logprobs[:, 0].sum(), total, rtol=1e-5)
        np.testing.assert_allclose(score, total / (len(tokens) + 1) ** length_penalty, rtol=1e-5)


def test_forbidden_tokens_are_never_taken():
    """-inf and NaN are no scores: with one token left there is one sequence, however many beams."""
    made = BeamSearch(BeamSearchParams(3, 2), 2, frozenset({EOS}))
    row = np.array([-0.5, -np.inf, np.nan, -np.inf], dtype=np.float32)
    while not made.is_done:
        made.advance([Candidates(np.array([2, 1, 0, 3], dtype=np.int32), row)] * len(made.running))
    assert [f.beam.token_ids() for f in made.finished] == [[2, 2]]
    made = BeamSearch(BeamSearchParams(3, 2), 2, frozenset({EOS}))
    made.advance([Candidates(np.arange(4, dtype=np.int32), np.full(4, -np.inf, np.float32))])
    assert made.is_done and not made.finished


@pytest.mark.parametrize("wrong", [
    dict(beam_width=0), dict(beam_width=True), dict(beam_width=257), dict(max_tokens=0),
    dict(length_penalty=float("nan")), dict(length_penalty="1"), dict(early_stopping="always"),
    dict(early_stopping=1), dict(temperature=-1), dict(ignore_eos=1),
])  # fmt: skip
def test_wrong_values_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong})


@pytest.mark.parametrize("wrong", [
    dict(stop="a"), dict(prompt_logprobs=0), dict(logprob_token_ids=[1]),
])  # fmt: skip
def test_what_beams_cannot_do_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is not supported with beam search"):
        SamplingParams(**wrong).for_beam_search(BeamSearchParams(2, 3))


@pytest.mark.parametrize("overrides", [{}, {"forced_bos_token_id": 7}, {"forced_bos_token_id": None}])
def test_a_forced_token_is_the_one_that_the_owner_names(overrides):
    """What --override-generation-config says counts, as it does for the prompt. Guards against a
    length, and so a penalty, that is off by one."""
    config = SimpleNamespace(
        is_encoder_decoder=True,
        try_get_generation_config=lambda: {"forced_bos_token_id": 5},
        override_generation_config=overrides,
    )
    groups = BeamGroups(None, config)
    forced = {**{"forced_bos_token_id": 5}, **overrides}["forced_bos_token_id"]
    assert [t for t in (5, 7) if groups._num_forced_tokens([2, t])] == [forced] * bool(forced)

# SPDX-License-Identifier: Apache-2.0
"""Each sampling field alone, and each pair of them: what is drawn follows a distribution that is
computed apart, in float64 and one token at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

VOCAB, DRAWS = 24, 3000
PROMPT, OUTPUT = [0, 3, 5, 3], [7, 7, 2, 5]
LOGITS = np.random.default_rng(5).permutation(np.linspace(2.5, -2.5, VOCAB))
TOP = np.argsort(-LOGITS)

FIELDS = {
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=9),
    "top_p": dict(top_p=0.75),
    "min_p": dict(min_p=0.15),
    "presence_penalty": dict(presence_penalty=1.2),
    "frequency_penalty": dict(frequency_penalty=-0.8),
    "repetition_penalty": dict(repetition_penalty=1.7),
    "logit_bias": dict(logit_bias={int(TOP[5]): 2.0, int(TOP[0]): -1.5, 7: 1.0}),
    "allowed_token_ids": dict(allowed_token_ids=[2, 5, 7, *TOP[1:12].tolist()]),
    # The output ends in 2, 5: the first word must not go on, the second has not begun.
    "bad_words": dict(bad_words_token_ids=[[2, 5, int(TOP[1])], [9, int(TOP[2])], [int(TOP[3])]]),
    "min_tokens": dict(min_tokens=9, stop_token_ids=[int(TOP[0]), int(TOP[4])]),
    "min_tokens_over": dict(min_tokens=4, stop_token_ids=[int(TOP[0])]),
}
PAIRS = [
    pair
    for pair in itertools.combinations(FIELDS, 2)
    if pair != ("min_tokens", "min_tokens_over")
]


def reference(params: SamplingParams) -> np.ndarray:
    """Probabilities of the next token, from the definitions in the OpenAI API and upstream's docs."""
    logits = LOGITS.copy()
    if params.allowed_token_ids is not None:
        logits[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    for *before, last in params.bad_words_token_ids or []:
        if OUTPUT[len(OUTPUT) - len(before) :] == before:
            logits[last] = -np.inf
    if len(OUTPUT) < params.min_tokens:
        logits[params.stop_token_ids] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in range(VOCAB):
        if token in PROMPT or token in OUTPUT:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = OUTPUT.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    probs = np.exp(logits / params.temperature - (logits / params.temperature).max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    mass = 0.0
    for token in order:
        kept = probs[token] if mass < params.top_p else 0.0
        mass += probs[token]
        probs[token] = kept
    return probs / probs.sum()


def draw(params: list[SamplingParams]) -> np.ndarray:
    """A token for each, all in one batch."""
    states = RequestState(len(params), 16)
    sampler = Sampler(len(params), 0, torch.device("cpu"))
    rows = []
    for i, param in enumerate(params):
        row = states.add_request(str(i), len(PROMPT), PROMPT + OUTPUT, 0)
        sampler.add_request(row, str(i), param)
        rows.append(row)
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(len(params), 1)
    return sampler(logits, np.array(rows), states).sampled_token_ids[:, 0].numpy()


def assert_follows(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, against the 1 - 1e-6 quantile (Wilson-Hilferty)."""
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    kept = expected > 0
    wanted = expected[kept] * len(tokens)
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    dof = max(int(kept.sum()) - 1, 1)
    assert statistic < dof * (1 - 2 / (9 * dof) + 4.75 * (2 / (9 * dof)) ** 0.5) ** 3


@pytest.mark.parametrize("names", [*((name,) for name in FIELDS), *PAIRS], ids="+".join)
def test_fields_alone_and_in_pairs(names):
    """On the seeds 0, 1, 2, ...; guards against a field that is lost, or applied in another order
    than the reference, as soon as it meets another one."""
    fields: dict = {}
    for name in names:
        fields.update(FIELDS[name])
    params = [SamplingParams(seed=seed, max_tokens=20, **fields) for seed in range(DRAWS)]
    assert_follows(draw(params), reference(params[0]))


def test_each_request_has_its_own_fields():
    """All fields in one batch, interleaved: guards against rows that get a neighbour's."""
    names = list(FIELDS)
    params = [
        SamplingParams(seed=i // len(names), max_tokens=20, **FIELDS[names[i % len(names)]])
        for i in range(800 * len(names))
    ]
    tokens = draw(params)
    for place, _ in enumerate(names):
        assert_follows(tokens[place :: len(names)], reference(params[place]))


def test_a_seed_draws_the_same_beside_unseeded_neighbours():
    """Four runs: alone, and beside neighbours that differ each time."""
    rng = np.random.default_rng(0)
    names = list(FIELDS)
    seeded = [SamplingParams(seed=s, max_tokens=20, **FIELDS[n]) for s, n in enumerate(names)]
    alone = [int(draw([params])[0]) for params in seeded]
    for _ in range(4):
        others = [SamplingParams(max_tokens=20, **FIELDS[rng.choice(names)]) for _ in range(20)]
        batch = [*seeded, *others]
        order = rng.permutation(len(batch))
        drawn = dict(zip(order.tolist(), draw([batch[i] for i in order]).tolist()))
        assert [drawn[i] for i in range(len(seeded))] == alone

# SPDX-License-Identifier: Apache-2.0
"""The sampler: what it draws follows the distribution, whatever else is in the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu.sample.filters import apply_min_p, apply_top_k_top_p
from vllm.v1.worker.gpu.sample.random import uniform
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

CPU = torch.device("cpu")


def make(params: list[SamplingParams], prompt_len: int = 4) -> tuple[Sampler, RequestState, np.ndarray]:
    states = RequestState(max_num_reqs=len(params) + 2, max_model_len=64)
    sampler = Sampler(states.max_num_reqs, engine_seed=0, device=CPU)
    rows = []
    for i, param in enumerate(params):
        row = states.add_request(f"r{i}", prompt_len, list(range(prompt_len)), 0)
        sampler.add_request(row, f"r{i}", param)
        rows.append(row)
    return sampler, states, np.array(rows, dtype=np.int32)


def test_greedy_rows_are_argmax_beside_random_ones():
    """Guards against a mixed batch in which greedy rows are drawn, or rows are swapped."""
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    params = [SamplingParams(temperature=t, seed=1) for t in (0.0, 1.0, 0.0, 0.7)]
    sampler, states, rows = make(params)
    out = sampler(logits.clone(), rows, states).sampled_token_ids[:, 0]
    assert out[0] == logits[0].argmax() and out[2] == logits[2].argmax()


def test_a_seeded_request_draws_the_same_whatever_runs_beside_it():
    """Guards against draws that depend on the batch, its order or its size."""
    torch.manual_seed(0)
    logits = torch.randn(5, 200)
    seeded = SamplingParams(temperature=1.0, seed=7, top_p=0.9)
    alone_sampler, states, rows = make([seeded])
    alone = alone_sampler(logits[2:3].clone(), rows, states).sampled_token_ids[0, 0]
    others = [SamplingParams(temperature=1.3), SamplingParams(temperature=0.5, top_k=3)]
    sampler, states, rows = make([*others, seeded, *others])
    beside = sampler(logits.clone(), rows, states).sampled_token_ids[2, 0]
    assert alone == beside


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_a_row_without_a_distribution_gives_a_token_all_the_same(value):
    """Nothing is left where a request forbids every token (the one allowed is a stop token, before
    `min_tokens`), or where the logits are no numbers. Guards against an id beyond the vocabulary,
    which the next step's embedding cannot look up: it would end every request."""
    torch.manual_seed(0)
    logits = torch.randn(2, 50)
    logits[0] = value
    sampler, states, rows = make([SamplingParams(temperature=1.0, seed=i) for i in range(2)])
    out = sampler(logits.clone(), rows, states).sampled_token_ids[:, 0]
    assert 0 <= out[0] < 50
    alone, alone_states, row = make([SamplingParams(temperature=1.0, seed=1)])
    assert out[1] == alone(logits[1:].clone(), row, alone_states).sampled_token_ids[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_every_token_is_forbidden_is_named(temperature):
    """One allowed token, which is a stop token before `min_tokens`; its neighbours draw. Guards
    against a forbidden token that is told as if it were one."""
    torch.manual_seed(0)
    forbidden = SamplingParams(
        temperature=temperature, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2
    )
    beside = [SamplingParams(temperature=t, top_k=3, seed=1) for t in (0.0, 1.0)]
    sampler, states, rows = make([beside[0], forbidden, beside[1]])
    output = sampler(torch.randn(3, 50), rows, states)
    assert output.has_none.tolist() == [False, True, False]


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0),
        dict(temperature=0.6),
        dict(temperature=1.5, top_k=5),
        dict(temperature=1.0, top_p=0.7),
        dict(temperature=1.0, min_p=0.2),
        dict(temperature=0.9, top_k=8, top_p=0.8, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(params):
    """Chi-square of 20,000 draws (seeds 0..) against the distribution computed in float64; guards
    against biased draws and filters applied in a wrong order. The bound is the 1 - 1e-6 quantile
    (Wilson-Hilferty), so that a right sampler fails once in a million choices of seeds."""
    vocab, draws = 24, 20_000
    logits = torch.linspace(2.0, -2.0, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(3))]
    sampler = Sampler(draws, 0, CPU)
    states = RequestState(draws, 8)
    for i in range(draws):
        row = states.add_request(str(i), 2, [0, 1], 0)
        sampler.add_request(row, str(i), SamplingParams(seed=i, **params))
    rows = np.array([states.req_id_to_index[str(i)] for i in range(draws)], dtype=np.int32)
    out = sampler(logits.repeat(draws, 1), rows, states).sampled_token_ids[:, 0]
    counts = torch.bincount(out, minlength=vocab).double()
    expected = reference_distribution(logits.double(), **params) * draws
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    dof = int(kept.sum()) - 1
    bound = dof * (1 - 2 / (9 * dof) + 4.75 * (2 / (9 * dof)) ** 0.5) ** 3
    assert statistic < bound


def reference_distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    probs = (logits / temperature).softmax(-1)
    probs = torch.where(probs < min_p * probs.max(), 0.0, probs)
    order = probs.argsort(descending=True)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    kept[order[: top_k or len(order)]] = True
    probs = torch.where(kept, probs, 0.0)
    probs /= probs.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            probs[token] = 0.0
        mass += float(probs[token])
    return probs / probs.sum()


def test_top_p_sorts_the_whole_vocabulary_where_the_guess_is_too_small():
    """A flat distribution's nucleus is larger than the first look; guards against cutting it off."""
    logits = torch.zeros(2, 5000) + torch.rand(2, 5000) * 1e-3
    logits[1, :3] = 20.0
    filtered = logits.clone()
    apply_top_k_top_p(filtered, torch.tensor([0, 0]), torch.tensor([0.9, 0.9]))
    assert 4400 < int((filtered[0] > -torch.inf).sum()) < 4600
    assert int((filtered[1] > -torch.inf).sum()) == 3


def test_top_p_keeps_the_most_likely_token_however_small_it_is():
    logits = torch.tensor([[3.0, 0.0, -1.0]])
    apply_top_k_top_p(logits, torch.tensor([0]), torch.tensor([1e-9]))
    assert (logits > -torch.inf).tolist() == [[True, False, False]]


def test_min_p_zero_changes_nothing():
    logits = torch.randn(2, 9)
    before = logits.clone()
    apply_min_p(logits, torch.tensor([0.0, 1.0]))
    assert torch.equal(logits[0], before[0])
    assert int((logits[1] > -torch.inf).sum()) == 1


def test_min_tokens_forbids_stop_tokens_until_then():
    """Guards against ending early, and against forbidding a token too long."""
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=5, stop_token_ids=[3])
    sampler, states, rows = make([params])
    logits = torch.zeros(1, 6)
    logits[0, 3], logits[0, 4] = 9.0, 5.0
    taken = []
    for _ in range(3):
        token = sampler(logits.clone(), rows, states).sampled_token_ids[:, 0]
        states.append_tokens(rows, token.numpy())
        taken.append(int(token))
    assert taken == [4, 4, 3]


def test_a_row_forgets_what_the_request_before_it_wanted():
    """Rows are reused; guards against min_tokens or a temperature that outlives its request."""
    sampler, states, rows = make([SamplingParams(min_tokens=3, stop_token_ids=[1], logprobs=2)])
    states.remove_request("r0")
    row = states.add_request("next", 4, [0, 1, 2, 3], 0)
    assert row == rows[0]
    sampler.add_request(row, "next", SamplingParams(temperature=0.0))
    logits = torch.zeros(1, 4)
    logits[0, 1] = 5.0
    out = sampler(logits, rows, states)
    assert int(out.sampled_token_ids) == 1 and out.logprobs_tensors is None


def test_logprobs_are_of_the_raw_logits():
    """Guards against logprobs taken after temperature or filters."""
    torch.manual_seed(1)
    logits = torch.randn(1, 30)
    sampler, states, rows = make([SamplingParams(temperature=0.3, top_k=1, logprobs=3)])
    out = sampler(logits.clone(), rows, states)
    ids, values, ranks = out.logprobs_tensors.tolists()[:3]
    reference = logits.log_softmax(-1)[0]
    assert ids[0, 0] == int(out.sampled_token_ids) and ranks[0] == 1
    assert ids[0, 1:].tolist() == reference.topk(3).indices.tolist()
    np.testing.assert_allclose(values[0], reference[ids[0].tolist()].numpy(), rtol=1e-6)


def test_uniform_draws_of_neighbouring_seeds_and_positions_are_independent():
    """Guards against streams that are shifted copies of each other."""
    seeds = np.arange(200, dtype=np.uint64)
    grid = np.stack([uniform(seeds, np.full(200, p)) for p in range(200)])
    assert 0.49 < grid.mean() < 0.51 and len(np.unique(grid)) == grid.size
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1, 1:].ravel(), grid[1:, :-1].ravel())[0, 1]) < 0.02


def draw_greedily(params: SamplingParams, logits, prompt=(0, 1), output=()):
    """The token that a greedy request with this prompt and output takes after `logits`."""
    states = RequestState(2, 32)
    sampler = Sampler(2, 0, CPU)
    row = states.add_request("r", len(prompt), [*prompt, *output], 0)
    sampler.add_request(row, "r", params)
    rows = np.array([row], dtype=np.int32)
    return int(sampler(torch.tensor([logits]), rows, states).sampled_token_ids)


@pytest.mark.parametrize(
    ("fields", "output", "expected"),
    [
        (dict(logit_bias={3: 10.0}), (), 3),
        (dict(logit_bias={2: -100.0}), (), 4),
        (dict(allowed_token_ids=[0, 3]), (), 3),
        (dict(repetition_penalty=2.0), (2,), 4),
        # Only what is in the output counts for these two: 2 is in the prompt as well.
        (dict(frequency_penalty=1.0), (), 2),
        (dict(frequency_penalty=0.6), (2,), 2),
        (dict(frequency_penalty=0.6), (2, 2), 4),
        (dict(presence_penalty=0.6), (2, 2), 2),
        (dict(presence_penalty=1.1), (2,), 4),
        (dict(bad_words_token_ids=[[2]]), (), 4),
        (dict(bad_words_token_ids=[[5, 2]]), (), 2),
        (dict(bad_words_token_ids=[[5, 2]]), (5,), 4),
        (dict(bad_words_token_ids=[[5, 6, 2]]), (6,), 2),
    ],
)
def test_each_feature_changes_what_a_greedy_request_takes(fields, output, expected):
    """Logits 0, 1, 5, 0.5, 4, ...: without the feature token 2 is taken, then 4. Guards against a
    feature that is dropped, or counts the prompt where it must not."""
    logits = [0.0, 1.0, 5.0, 0.5, 4.0, -1.0, -2.0]
    params = SamplingParams(temperature=0.0, **fields)
    assert draw_greedily(params, logits, prompt=(1, 2), output=output) == expected


def test_repetition_penalty_counts_the_prompt():
    logits = [0.0, 1.0, 5.0, 0.5, 4.0]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert draw_greedily(params, logits, prompt=(2,)) == 4
    assert draw_greedily(params, logits, prompt=(1,)) == 2


def test_named_tokens_take_the_place_of_the_likeliest():
    """`logprob_token_ids` beside a request that wants the likeliest and one that wants none; guards
    against columns of a neighbour."""
    torch.manual_seed(2)
    logits = torch.randn(3, 30)
    params = [
        SamplingParams(temperature=0.0, logprob_token_ids=[5, 29, 0, 7]),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0),
    ]
    sampler, states, rows = make(params)
    out = sampler(logits.clone(), rows, states)
    ids, values, ranks = out.logprobs_tensors.tolists()[:3]
    reference = logits.log_softmax(-1)
    assert ids[0].tolist() == [int(logits[0].argmax()), 5, 29, 0, 7]
    assert ids[1, :3].tolist() == [int(logits[1].argmax()), *logits[1].topk(2).indices.tolist()]
    for row, width in ((0, 5), (1, 3)):
        expected = reference[row][ids[row, :width].tolist()]
        np.testing.assert_allclose(values[row, :width], expected, rtol=1e-5)
    assert ranks.tolist() == [1, 1, 1]


# What makes logits other than they are, or wants more than the most likely token.
NOT_PLAIN = [
    {"temperature": 1.0},
    {"logprobs": 2},
    {"logit_bias": {3: 100.0}},
    {"allowed_token_ids": [5, 6]},
    {"repetition_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"no_repeat_ngram_size": 1},
]


def sample_the_long_way(
    sampler: Sampler, logits: torch.Tensor, rows: np.ndarray, states: RequestState
) -> SamplerOutput:
    """By the way that all requests can take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_takes_argmax", lambda rows, states: False)
        return sampler(logits.clone(), rows, states)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_greedy_batches_get_the_same_tokens_the_short_way(data):
    """Greedy requests, some with features; logits of the model's dtype with ties, NaN, and
    rows in which all is forbidden. Guards against a batch that is taken for plain and is not, and
    against another token among equals."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    options = data.draw(st.lists(st.sampled_from([{}] * 14 + NOT_PLAIN), min_size=1, max_size=4))
    greedy = {"temperature": 0.0, "seed": 1}
    sampler, states, rows = make([SamplingParams(**greedy | option) for option in options])
    values = st.sampled_from([-torch.inf, -1.0, 0.0, 1.5])
    few = data.draw(st.lists(values, min_size=4, max_size=4))
    wide = torch.tensor(few * 13).repeat(len(rows), 1).to(dtype)
    if data.draw(st.booleans()):
        wide[0, data.draw(st.integers(0, 49))] = torch.nan
    ours = sampler(wide.clone()[:, :50], rows, states)
    general = sample_the_long_way(sampler, wide[:, :50], rows, states)
    assert torch.equal(ours.sampled_token_ids, general.sampled_token_ids)
    assert ours.sampled_token_ids.dtype is general.sampled_token_ids.dtype
    assert torch.equal(ours.has_none, general.has_none)
    assert (ours.logprobs_tensors is None) == (general.logprobs_tensors is None)


@pytest.mark.parametrize("option", NOT_PLAIN, ids=lambda option: next(iter(option)))
def test_one_request_that_wants_more_takes_the_batch_the_long_way(option):
    """And once it is gone, and its row another's, no longer. Guards against a short way that nobody
    or everybody takes."""
    plain = SamplingParams(temperature=0.0)
    sampler, states, rows = make([plain, SamplingParams(**{"temperature": 0.0} | option)])
    assert sampler._takes_argmax(rows[:1], states) and not sampler._takes_argmax(rows, states)
    states.remove_request("r1")
    row = states.add_request("r2", 4, [0, 1, 2, 3], 0)
    sampler.add_request(row, "r2", plain)
    assert row == rows[1] and sampler._takes_argmax(rows, states)


def test_what_concerns_some_steps_takes_the_long_way_in_those():
    """`min_tokens` holds back the first tokens, a forced end the last one. Guards against steps in
    which they are passed over, and against all others being slow for their sake."""
    first = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[9])
    last = SamplingParams(temperature=0.0, max_tokens=4)
    last.forced_eos_token_id = [7]
    sampler, states, rows = make([first, last])
    taken = []
    for _ in range(4):
        taken.append([sampler._takes_argmax(rows[i : i + 1], states) for i in range(2)])
        states.append_tokens(rows, np.array([1, 1]))
    assert taken == [[False, True], [False, True], [True, True], [True, False]]

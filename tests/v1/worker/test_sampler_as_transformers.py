# SPDX-License-Identifier: Apache-2.0
"""Features that Transformers has too do to logits what its processors do, in its order."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

VOCAB, PROMPT = 12, [2, 0, 5]
EOS = 2


def greedy(params: SamplingParams, steps: torch.Tensor) -> list[int]:
    """Tokens sampled from the logits (steps, vocab) one after the other."""
    states = RequestState(max_num_reqs=2, max_model_len=64)
    sampler = Sampler(states.max_num_reqs, engine_seed=0, device=torch.device("cpu"))
    row = states.add_request("r", len(PROMPT), PROMPT, 0)
    sampler.add_request(row, "r", params)
    rows, tokens = np.array([row], dtype=np.int32), []
    for logits in steps:
        token = sampler(logits[None].clone(), rows, states).sampled_token_ids[:, 0].numpy()
        states.append_tokens(rows, token)
        tokens.append(int(token[0]))
    return tokens


def greedy_by_transformers(processors: LogitsProcessorList, steps: torch.Tensor) -> list[int]:
    ids = torch.tensor([PROMPT])
    for logits in steps:
        token = processors(ids, logits[None].clone()).argmax(-1)
        ids = torch.cat([ids, token[None]], dim=-1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_repeat_ngram(size):
    """A run of `size` tokens comes once in prompt and output. Guards against runs that are looked
    for in the output alone, off by one, or across the last token."""
    generator = torch.manual_seed(size)
    count = 8 if size == 1 else 24
    # Few likely tokens, so that runs would repeat all the time.
    steps = torch.randn(count, VOCAB, generator=generator) + torch.linspace(4, 0, VOCAB)
    ours = greedy(SamplingParams(temperature=0, no_repeat_ngram_size=size, max_tokens=50), steps)
    reference = LogitsProcessorList([NoRepeatNGramLogitsProcessor(size)])
    assert ours == greedy_by_transformers(reference, steps)
    assert ours != greedy(SamplingParams(temperature=0, max_tokens=50), steps)


def test_a_forced_end_comes_last_and_over_what_is_forbidden():
    """The last of `max_tokens` is EOS although the penalty, the n-grams and `min_tokens` are all
    against it. Guards against a forced token that another feature forbids again."""
    params = SamplingParams(
        temperature=0,
        no_repeat_ngram_size=1,
        min_tokens=6,
        repetition_penalty=1.7,
        stop_token_ids=[EOS],
        forced_eos_token_id=EOS,
        max_tokens=6,
    )
    steps = torch.randn(6, VOCAB, generator=torch.manual_seed(0))
    steps[:, EOS] += 9.0
    tokens = greedy(params, steps)
    end = len(PROMPT) + 6
    reference = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            NoRepeatNGramLogitsProcessor(1),
            MinLengthLogitsProcessor(end, EOS),
            ForcedEOSTokenLogitsProcessor(end, EOS),
        ]
    )
    assert tokens == greedy_by_transformers(reference, steps)
    assert tokens.index(EOS) == 5


def test_a_forced_end_is_not_forced_where_it_ends_nothing():
    """`ignore_eos` asks for tokens beyond an end: none is forced in."""
    params = SamplingParams(temperature=0, forced_eos_token_id=EOS, max_tokens=2, ignore_eos=True)
    steps = torch.zeros(2, VOCAB)
    steps[:, 7] = 1.0
    assert greedy(params, steps) == [7, 7]

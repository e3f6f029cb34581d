# SPDX-License-Identifier: Apache-2.0
"""Logits processors that are not built in: what they are told, and that what they do has effect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
    load_custom_logitsprocs,
)
from vllm.v1.worker.gpu.sample.custom import CustomLogitsProcessors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

CPU = torch.device("cpu")


class ForceToken(LogitsProcessor):
    """`extra_args={"force": token}`: that token and no other. Written to the interface alone."""

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance((sampling_params.extra_args or {}).get("force", 0), int):
            raise ValueError("force must be a token id")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.forced: dict[int, int] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.forced.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.forced.pop(index, None)
            if "force" in (params.extra_args or {}):
                self.forced[index] = params.extra_args["force"]
        for source, target, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            moving = self.forced.pop(source, None)
            self.forced.pop(target, None)
            if moving is not None:
                self.forced[target] = moving

    def apply(self, logits):
        for index, token in self.forced.items():
            kept = logits[index, token].clone()
            logits[index] = -torch.inf
            logits[index, token] = kept
        return logits


class Hottest(ForceToken):
    """Argmax-invariant: what is not the most likely token becomes impossible."""

    def is_argmax_invariant(self):
        return True

    def apply(self, logits):
        return torch.where(logits == logits.amax(-1, keepdim=True), logits, -torch.inf)


class NoRepeat(AdapterLogitsProcessor):
    """No token of prompt or output again, for requests that ask for it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return self._forbid if (params.extra_args or {}).get("no_repeat") else None

    @staticmethod
    def _forbid(prompt_ids, output_ids, logits):
        logits[prompt_ids + output_ids] = -torch.inf
        return logits


def make(processors, params, prompt=(0, 1)):
    states = RequestState(len(params) + 2, 32)
    sampler = Sampler(len(params) + 2, 0, CPU, processors)
    rows = []
    for i, param in enumerate(params):
        rows.append(states.add_request(f"r{i}", len(prompt), list(prompt), 0))
        sampler.add_request(rows[-1], f"r{i}", param)
    return sampler, states, np.array(rows)


def step(sampler, states, rows, vocab=8):
    logits = torch.arange(vocab, dtype=torch.float32).repeat(len(rows), 1)
    tokens = sampler(logits, rows, states).sampled_token_ids[:, 0].numpy()
    states.append_tokens(rows, tokens)
    return tokens.tolist()


def test_only_requests_that_ask_are_touched():
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, extra_args={"force": 2}),
        SamplingParams(temperature=1.0, seed=1, extra_args={"force": 3}),
    ]
    sampler, states, rows = make([ForceToken(None, CPU, False)], params)
    for _ in range(3):
        assert step(sampler, states, rows) == [7, 2, 3]
        assert step(sampler, states, rows[::-1].copy()) == [3, 2, 7]


def test_output_tokens_are_told_as_they_come():
    """Guards against a list that stays as it was when the request was added."""
    params = [SamplingParams(temperature=0.0, extra_args={"no_repeat": True})]
    sampler, states, rows = make([NoRepeat(None, CPU, False)], params)
    assert [step(sampler, states, rows)[0] for _ in range(6)] == [7, 6, 5, 4, 3, 2]


def test_argmax_invariant_ones_run_after_the_temperature():
    params = [SamplingParams(temperature=5.0, seed=s) for s in range(50)]
    params.append(SamplingParams(temperature=0.0))
    sampler, states, rows = make([Hottest(None, CPU, False)], params)
    assert set(step(sampler, states, rows)) == {7}


def test_a_resumed_request_comes_with_its_output():
    """After a preemption it is added again, at whichever row, with what it had drawn."""
    param = SamplingParams(temperature=0.0, extra_args={"no_repeat": True})
    sampler, states, rows = make([NoRepeat(None, CPU, False)], [param])
    assert step(sampler, states, rows) == [7]
    states.remove_request("r0")
    row = states.add_request("r0", 2, [0, 1, 7], 0)
    sampler.add_request(row, "r0", param)
    assert step(sampler, states, np.array([row])) == [6]


class Mirror(LogitsProcessor):
    """Keeps the batch as the interface says, and nothing else."""

    def __init__(self):
        self.batch: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        if update is None:
            return
        for index in update.removed:
            del self.batch[index]
        for index, params, _, output in update.added:
            self.batch[index] = (params.seed, output)
        for source, target, _ in update.moved:
            self.batch[target] = self.batch.pop(source)
        assert sorted(self.batch) == list(range(update.batch_size))

    def apply(self, logits):
        marks = torch.tensor([float(self.batch[i][0]) for i in range(len(logits))])
        return logits + marks.unsqueeze(-1)


@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.randoms())))
def test_the_batch_has_no_holes_and_no_strangers(steps):
    """Requests come, end, pause and are sampled in any order; each row's logits are marked with its
    own request's number. Guards against indices that go astray."""
    mirror = Mirror()
    custom = CustomLogitsProcessors([mirror])
    states = RequestState(8, 64)
    number = 0
    alive: dict[str, int] = {}
    for ending, paused, random in steps:
        for key in list(alive):
            if states.req_id_to_index[key] in ending:
                states.remove_request(key)
                del alive[key]
        while len(alive) < 8 and random.random() < 0.6:
            number += 1
            row = states.add_request(str(number), 1, [1], 0)
            custom.add_request(row, str(number), SamplingParams(seed=number))
            alive[str(number)] = number
        rows = [states.req_id_to_index[key] for key in alive]
        rows = [row for row in rows if row not in paused]
        random.shuffle(rows)
        if not rows:
            continue
        custom.update(np.array(rows), states)
        marked = custom.apply(torch.zeros(len(rows), 3), np.array(rows))
        number_of_row = {states.req_id_to_index[key]: value for key, value in alive.items()}
        assert marked[:, 0].tolist() == [number_of_row[row] for row in rows]
        states.append_tokens(np.array(rows), np.arange(len(rows)))


@pytest.mark.parametrize(
    "name",
    ["no.such.module:X", "json:NotThere", "json:JSONDecoder", "plain"],
)
def test_what_cannot_be_loaded_is_refused(name):
    """By name, before any request comes."""
    with pytest.raises(ValueError, match=name.split(":")[0]):
        load_custom_logitsprocs([name])


def test_built_in_class_by_dotted_path():
    path = "vllm.v1.sample.logits_processor"
    for name in (f"{path}:AdapterLogitsProcessor", f"{path}.AdapterLogitsProcessor"):
        assert load_custom_logitsprocs([name]) == [AdapterLogitsProcessor]

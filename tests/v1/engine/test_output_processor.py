# SPDX-License-Identifier: Apache-2.0
"""Engine core outputs become request outputs: kinds, logprobs, children, failures, statistics."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineGenerateError, RequestRefusedError
from vllm.v1.engine.input_processor import split_request
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.request_state import RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists


def request_of(prompt_ids, request_id="r-1", external="r", arrival_time=0.0, **params):
    sampling_params = SamplingParams(max_tokens=100, **params)
    return EngineCoreRequest(
        request_id, prompt_ids, sampling_params, arrival_time, external_req_id=external
    )


def feed(processor, ids, kind_of_end=FinishReason.LENGTH, request_id="r-1", stop_reason=None):
    """Gives the ids one by one; returns all request outputs."""
    outputs = []
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        step = EngineCoreOutput(
            request_id,
            [token_id],
            finish_reason=kind_of_end if last else None,
            stop_reason=stop_reason if last else None,
        )
        outputs += processor.process_outputs([step]).request_outputs
    return outputs


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("interval", [1, 3, 100])
def test_kinds_tell_the_same_story(tokenizer, kind, interval):
    """Whatever the kind and the interval: the same text, ids and end, none twice, none lost."""
    ids = tokenizer.encode("Héllo wörld 😀, a text of some tokens")
    processor = OutputProcessor(tokenizer, stream_interval=interval)
    processor.add_request(request_of([1], output_kind=kind), "prompt")
    outputs = feed(processor, ids)
    deltas = outputs if kind is RequestOutputKind.DELTA else outputs[-1:]
    assert "".join(o.outputs[0].text for o in deltas) == tokenizer.decode(ids)
    assert [t for o in deltas for t in o.outputs[0].token_ids] == ids
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[0].prompt == "prompt" and outputs[0].request_id == "r"
    wanted = {1: len(ids), 3: 2 + (len(ids) - 2) // 3, 100: 2}[interval]
    if kind is RequestOutputKind.FINAL_ONLY:
        wanted = 1
    assert abs(len(outputs) - wanted) <= (interval == 3)
    assert not processor.has_unfinished_requests()


def test_cumulative_outputs_do_not_change_afterwards(tokenizer):
    """A consumer may keep an output: its list must not be the one that grows."""
    ids = tokenizer.encode("one two three")
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of([1]), None)
    outputs = feed(processor, ids)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [ids[:3][: i + 1] for i in range(3)]


def test_stop_string_ends_here_and_there(tokenizer):
    """The engine core goes on until it is told; what it sends meanwhile is dropped."""
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of([1], stop=["wor"]), None)
    outputs = []
    for token_id in tokenizer.encode("hello world and more"):
        done = processor.process_outputs([EngineCoreOutput("r-1", [token_id])])
        outputs += done.request_outputs
        if done.reqs_to_abort:
            break
    assert done.reqs_to_abort == ["r-1"]
    assert outputs[-1].outputs[0].text == "hello "
    assert outputs[-1].outputs[0].stop_reason == "wor"
    late = processor.process_outputs([EngineCoreOutput("r-1", [5])])
    assert not late.request_outputs and not late.reqs_to_abort


def rows_for(ids, k, rank=3):
    """Logprobs -1, -2, ... of the token itself and of the k tokens after it in the vocabulary."""
    token_ids = np.array([[t + j for j in range(k + 1)] for t in ids], np.int32)
    values = -np.ones((len(ids), k + 1), np.float32).cumsum(axis=1)
    return LogprobsLists(token_ids, values, np.full(len(ids), rank, np.int32))


def test_logprobs(tokenizer):
    """Each position has its token with its rank and the best ones; texts joined are the output's,
    also where a character takes several tokens."""
    text = "a 😀 b"
    ids = tokenizer.encode(text)
    assert sum("\ufffd" in tokenizer.decode([t]) for t in ids) > 1, "the emoji is split"
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of([1], logprobs=2, output_kind=RequestOutputKind.DELTA), None)
    positions, total = [], None
    for i, token_id in enumerate(ids):
        step = EngineCoreOutput(
            "r-1", [token_id], rows_for([token_id], 4),
            finish_reason=FinishReason.LENGTH if i == len(ids) - 1 else None,
        )  # fmt: skip
        (output,) = processor.process_outputs([step]).request_outputs
        assert len(output.outputs[0].logprobs) == 1
        positions += output.outputs[0].logprobs
        total = output.outputs[0].cumulative_logprob
    assert total == -float(len(ids))
    assert [list(position) for position in positions] == [[t, t + 1, t + 2] for t in ids]
    assert "".join(position[t].decoded_token for t, position in zip(ids, positions)) == text
    first = positions[0]
    assert [(e.logprob, e.rank) for e in first.values()] == [(-1.0, 3), (-2.0, 1), (-3.0, 2)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs(tokenizer, kind):
    """One entry a prompt token, None first; with deltas they come once."""
    prompt = tokenizer.encode("a b c")
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of(prompt, prompt_logprobs=1, output_kind=kind), None)
    first = EngineCoreOutput("r-1", [7], new_prompt_logprobs_tensors=rows_for(prompt[1:], 1))
    last = EngineCoreOutput("r-1", [8], finish_reason=FinishReason.LENGTH)
    outputs = processor.process_outputs([first]).request_outputs
    outputs += processor.process_outputs([last]).request_outputs
    told = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(told) == (2 if kind is RequestOutputKind.CUMULATIVE else 1)
    assert told[0][0] is None and len(told[0]) == len(prompt)
    assert [list(position)[0] for position in told[0][1:]] == prompt[1:]


def test_children_have_seeds_of_their_own():
    """n samples with one seed must differ from each other and be the same each time."""
    made = list(split_request(request_of([1], n=3, seed=7)))
    assert [child.sampling_params.seed for child, _, _ in made] == [7, 8, 9]
    assert all(child.sampling_params.n == 1 for child, _, _ in made)
    assert len({child.request_id for child, _, _ in made}) == 3
    big = list(split_request(request_of([1], n=2, seed=2**63 - 1)))
    assert big[1][0].sampling_params.seed < 2**63


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_parent_ends_with_its_last_child(tokenizer, kind):
    """One output stream for n completions, finished once, with every completion in it."""
    processor = OutputProcessor(tokenizer)
    children = list(split_request(request_of([1], n=2, output_kind=kind)))
    for child, parent, index in children:
        processor.add_request(child, None, parent, index)
    outputs = feed(processor, [5, 6], request_id=children[1][0].request_id)
    outputs += feed(processor, [7, 8, 9], request_id=children[0][0].request_id)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is not RequestOutputKind.DELTA:
        assert [list(c.token_ids) for c in outputs[-1].outputs] == [[7, 8, 9], [5, 6]]
    assert not processor._parents and not processor.has_unfinished_requests()


def test_failed_child_ends_its_siblings(tokenizer):
    """Nobody waits for completions that will not come, and the engine drops the others."""
    processor = OutputProcessor(tokenizer)
    queue = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "r-1")
    children = list(split_request(request_of([1], n=3)))
    for child, parent, index in children:
        processor.add_request(child, None, parent, index, queue)
    ids = [child.request_id for child, _, _ in children]
    failure = EngineCoreOutput(ids[1], [], finish_reason=FinishReason.ERROR, error_message="no!")
    done = processor.process_outputs([failure])
    assert sorted(done.reqs_to_abort) == [ids[0], ids[2]]
    with pytest.raises(EngineGenerateError, match="no!"):
        asyncio.run(queue.get())
    assert not processor.has_unfinished_requests() and not processor._parents


@pytest.mark.parametrize("is_engine_fault", [False, True])
def test_whose_fault_a_failure_is(tokenizer, is_engine_fault):
    """A request that asks for too much is its client's error; else a client would try again."""
    processor = OutputProcessor(tokenizer)
    queue = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "r-1")
    processor.add_request(request_of([1]), None, queue=queue)
    failure = EngineCoreOutput(
        "r-1", [], finish_reason=FinishReason.ERROR, error_message="no!",
        is_engine_fault=is_engine_fault,
    )  # fmt: skip
    processor.process_outputs([failure])
    with pytest.raises(EngineGenerateError) as caught:
        asyncio.run(queue.get())
    assert isinstance(caught.value, RequestRefusedError) is not is_engine_fault


def test_n_and_the_longest_completion_are_counted(tokenizer):
    """Once for a request, when its last completion has ended."""
    processor = OutputProcessor(tokenizer, log_stats=True)
    for child, parent, index in split_request(request_of([1], n=2)):
        processor.add_request(child, None, parent, index)
    first, second = list(processor.request_states)
    stats = IterationStats()
    processor.process_outputs(
        [EngineCoreOutput(first, [5, 6, 7], finish_reason=FinishReason.LENGTH)], 0.0, stats
    )
    assert stats.n_params_iter == []
    processor.process_outputs(
        [EngineCoreOutput(second, [5], finish_reason=FinishReason.LENGTH)], 0.0, stats
    )
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([2], [3])


def test_failure_without_a_queue_is_an_output(tokenizer):
    """`LLM` gives back what the other prompts of its batch brought."""
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of([1], output_kind=RequestOutputKind.FINAL_ONLY), None)
    failure = EngineCoreOutput("r-1", [], finish_reason=FinishReason.ERROR, error_message="no!")
    (output,) = processor.process_outputs([failure]).request_outputs
    assert output.finished and output.outputs[0].finish_reason == "error"


def test_abort_by_either_id(tokenizer):
    """A client's id ends all requests that bear it, an engine's one request with its children."""
    processor = OutputProcessor(tokenizer)
    processor.add_request(request_of([1], "r-1"), None)
    processor.add_request(request_of([1], "r-2"), None)
    for child, parent, index in split_request(request_of([1], "s-1", "s", n=2)):
        processor.add_request(child, None, parent, index)
    assert processor.abort_requests(["nobody"]).reqs_to_abort == []
    assert processor.abort_requests(["r"]).reqs_to_abort == ["r-1", "r-2"]
    assert sorted(processor.abort_requests(["s-1"], internal=True).reqs_to_abort) == [
        "0_s-1", "1_s-1",
    ]  # fmt: skip
    assert not processor.has_unfinished_requests()


def test_collector_merges_what_was_not_fetched(tokenizer):
    """A slow consumer must lose nothing, and must not make the engine wait."""
    ids = tokenizer.encode("a text that nobody reads until it is complete")
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        processor = OutputProcessor(tokenizer)
        queue = RequestOutputCollector(kind, "r-1")
        processor.add_request(request_of([1], output_kind=kind), None, queue=queue)
        feed(processor, ids)
        output = asyncio.run(queue.get())
        assert output.finished and list(output.outputs[0].token_ids) == ids
        assert output.outputs[0].text == tokenizer.decode(ids)
        assert queue.get_nowait() is None


def test_statistics_of_a_request(tokenizer):
    """Times are differences on one clock; each token and each request is counted once."""
    processor = OutputProcessor(tokenizer, log_stats=True)
    stats = IterationStats()
    processor.add_request(request_of([1, 2], arrival_time=stats.iteration_timestamp - 9), None)

    def step(now, ids, events=(), **more):
        made = [EngineCoreEvent(kind, timestamp) for kind, timestamp in events]
        output = EngineCoreOutput("r-1", ids, events=made or None, **more)
        processor.process_outputs([output], now, stats)

    kinds = EngineCoreEventType
    step(
        105.0, [5], [(kinds.QUEUED, 100.0), (kinds.SCHEDULED, 101.0)],
        prefill_stats=PrefillStats(2, 1),
    )  # fmt: skip
    step(107.0, [6], [(kinds.PREEMPTED, 105.5), (kinds.SCHEDULED, 106.0)])
    step(108.0, [7], finish_reason=FinishReason.LENGTH)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (2, 1)
    assert stats.num_generation_tokens == 3 and stats.num_preempted_reqs == 1
    assert stats.time_to_first_tokens_iter == [9.0]
    assert stats.inter_token_latencies_iter == [2.0, 1.0]
    (request,) = stats.finished_requests
    assert request.finish_reason == "length" and request.e2e_latency == 9.0
    assert (request.queued_time, request.prefill_time) == (1.0, 4.0)
    assert (request.decode_time, request.inference_time) == (3.0, 7.0)
    assert (request.num_prompt_tokens, request.num_generation_tokens) == (2, 3)

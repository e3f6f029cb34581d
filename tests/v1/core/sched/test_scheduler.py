# SPDX-License-Identifier: Apache-2.0
"""What a step holds, what runner and clients are told, and how requests come and go."""

from __future__ import annotations

import numpy as np
import pytest

from tests.v1.core.utils import (
    Engine,
    full_spec,
    make_request,
    make_scheduler,
    window_spec,
)
from vllm.v1.core.block_pool import KVCacheIntegrityError
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import RequestStatus


def output_of(step, tokens: dict[str, list[int]], **fields) -> ModelRunnerOutput:
    """A runner's output with the given tokens."""
    req_ids = list(step.num_scheduled_tokens)
    index = {request_id: i for i, request_id in enumerate(req_ids)}
    return ModelRunnerOutput(req_ids, index, [tokens[r] for r in req_ids], **fields)


# --- What a step holds ---


def test_prompts_are_split_to_fill_the_step():
    """The budget is used up: running requests first, then prompts, the last in part."""
    engine = Engine(make_scheduler(100, max_num_batched_tokens=64))
    engine.add(make_request("a", 50, 5), make_request("b", 50, 5), make_request("c", 50, 5))
    assert engine.step().num_scheduled_tokens == {"a": 50, "b": 14}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 36, "c": 27}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 23}
    engine.run()
    assert all(len(engine.tokens(r)) == 5 for r in "abc")


def test_prompts_stay_whole_without_chunked_prefill():
    """A prompt that does not fit into what is left of the step waits for the next."""
    engine = Engine(
        make_scheduler(
            100, max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False
        )
    )
    engine.add(make_request("a", 50, 3), make_request("b", 50, 3), make_request("c", 10, 3))
    assert engine.step().num_scheduled_tokens == {"a": 50, "c": 10}
    assert engine.step().num_scheduled_tokens == {"a": 1, "c": 1, "b": 50}
    engine.run()


def test_long_prompts_leave_room_for_others():
    """With a threshold no prompt takes the whole step."""
    engine = Engine(
        make_scheduler(100, max_num_batched_tokens=64, long_prefill_token_threshold=20)
    )
    engine.add(make_request("a", 100), make_request("b", 100), make_request("c", 10))
    assert engine.step().num_scheduled_tokens == {"a": 20, "b": 20, "c": 10}


def test_max_num_seqs():
    """No more requests run at once than allowed; the next starts when one ends."""
    engine = Engine(make_scheduler(100, max_num_seqs=2))
    engine.add(*[make_request(name, 10, 3) for name in "abcd"])
    for _ in range(3):
        assert set(engine.step().num_scheduled_tokens) == {"a", "b"}
    assert set(engine.step().num_scheduled_tokens) == {"c", "d"}
    engine.run()


def test_priority_decides_who_is_admitted_and_who_makes_way():
    """The urgent one starts first though it came last, and takes the pages of the least urgent."""
    engine = Engine(make_scheduler(8, policy="priority", max_num_seqs=2))
    engine.add(make_request("low", 40, 60, priority=2))
    engine.step()
    engine.add(make_request("mid", 40, 60, priority=1), make_request("high", 40, 60, priority=0))
    assert set(engine.step().num_scheduled_tokens) == {"low", "high"}
    engine.run()
    ends = {r: max(i for i, s in enumerate(engine.steps) if r in s.num_scheduled_tokens)
            for r in ("low", "mid", "high")}  # fmt: skip
    assert ends["high"] < ends["mid"] < ends["low"]
    preempted = {r for s in engine.steps for r in s.preempted_req_ids}
    assert "low" in preempted and "high" not in preempted


def test_victims_have_no_tokens_in_the_step():
    """A victim that had tokens in the same step would leave pages in the prefix cache that nobody
    ever computes: silent garbage for whoever finds them."""
    engine = Engine(make_scheduler(12, policy="priority", max_num_batched_tokens=64))
    for i in range(12):
        engine.add(make_request(f"r{i}", 30, 40, priority=-i))
        engine.step()
    engine.run()
    assert sum(len(s.preempted_req_ids) for s in engine.steps) > 3
    for step in engine.steps:
        known = set(step.scheduled_cached_reqs.req_ids)
        assert not step.preempted_req_ids & known
        assert not step.preempted_req_ids & {new.req_id for new in step.scheduled_new_reqs}


def test_common_prompts_of_one_step_are_computed_once():
    """32 requests with one beginning, all new: it is computed once, and the others find it in the
    same step."""
    engine = Engine(make_scheduler(200, max_num_seqs=32, max_num_batched_tokens=2048))
    prefix = list(range(2, 514))
    engine.add(*[make_request(f"r{i}", prefix + [600 + i] * 16) for i in range(32)])
    assert engine.step().total_num_scheduled_tokens == 528 + 31 * 16
    engine.run()


@pytest.mark.parametrize(
    ("pages", "specs"),
    [
        (60, (full_spec(4),)),
        (22, (window_spec(10, 4),)),
        (60, (full_spec(4), window_spec(10, 4))),
        (60, (window_spec(6, 8), full_spec(4), window_spec(17, 8))),
    ],
)
def test_pages_that_are_found_hold_what_was_computed(pages: int, specs):
    """A small pool, common beginnings, preemption: the stand-in model reads every page a token
    attends to and finds what belongs there, in every group."""
    engine = Engine(
        make_scheduler(pages, *specs, max_num_batched_tokens=40, max_model_len=128, max_num_seqs=8)
    )
    prefix = list(range(2, 52))
    for i in range(40):
        prompt = prefix[: 10 * (i % 6)] + [100 + i] * (3 + i % 7)
        engine.add(make_request(f"r{i}", prompt, 30, hash_block_size=4))
        for _ in range(i % 4):
            engine.step()
    engine.run()
    assert all(len(engine.tokens(f"r{i}")) == 30 for i in range(40))
    assert any(new.num_computed_tokens >= 40 for s in engine.steps for new in s.scheduled_new_reqs)
    assert any(step.preempted_req_ids for step in engine.steps)


# --- What runner and clients are told ---


def test_the_runner_is_told_of_each_end_once():
    """Twice, and it might forget a new request; never, and its rows run out. The stand-in model
    checks it in every step."""
    engine = Engine(make_scheduler(100))
    engine.add(make_request("a", 10, 2), make_request("b", 10, 5), make_request("never", 10, 5))
    engine.step()
    engine.scheduler.finish_requests("never", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.finish_requests(["never", "b"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.model.finished == {"a", "b", "never"}
    assert not engine.model.tokens
    assert not engine.scheduler.has_requests()


def test_resumed_request_is_sent_whole():
    """The runner forgets a preempted request: it comes back as new, with all its tokens, and the
    list is not the scheduler's own, which grows."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("a", 60, 40), make_request("b", 44, 40))
    engine.run()
    preempted = next(s for s in engine.steps if s.preempted_req_ids)
    assert preempted.preempted_req_ids == {"b"}
    first, again = (n for s in engine.steps for n in s.scheduled_new_reqs if n.req_id == "b")
    assert first.prefill_token_ids == first.prompt_token_ids
    num_before = len(again.prefill_token_ids)
    assert 44 < num_before < 84
    assert again.prefill_token_ids == first.prompt_token_ids + engine.tokens("b")[: num_before - 44]


def test_clients_get_their_own():
    """Each client's envelope holds its requests only, and the names of those that ended."""
    scheduler = make_scheduler(100)
    scheduler.add_request(make_request("a", 10, 1, client_index=0))
    scheduler.add_request(make_request("b", 10, 2, client_index=3))
    step = scheduler.schedule()
    envelopes = scheduler.update_from_output(step, output_of(step, {"a": [5], "b": [6]}))
    assert {c: [o.request_id for o in e.outputs] for c, e in envelopes.items()} == {
        0: ["a"],
        3: ["b"],
    }
    assert envelopes[0].finished_requests == {"a"}
    assert envelopes[3].finished_requests is None
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    step = scheduler.schedule()
    assert step.finished_req_ids == {"a", "b"}
    envelopes = scheduler.update_from_output(step, output_of(step, {}))
    assert envelopes[3].finished_requests == {"b"} and not envelopes[3].outputs


def test_abort_while_the_step_runs():
    """The token of a request that was aborted meanwhile is dropped; its neighbour's is not."""
    scheduler = make_scheduler(100)
    for name in "ab":
        scheduler.add_request(make_request(name, 10, 5))
    step = scheduler.schedule()
    (ended,) = scheduler.finish_requests(["a", "unknown"], RequestStatus.FINISHED_ABORTED)
    assert ended.request_id == "a" and ended.get_finished_reason() is FinishReason.ABORT
    envelopes = scheduler.update_from_output(step, output_of(step, {"a": [5], "b": [6]}))
    assert [o.request_id for o in envelopes[0].outputs] == ["b"]
    scheduler.check_integrity()


def test_abort_everything():
    """None ends all, running and waiting: every page is free and every count zero."""
    engine = Engine(make_scheduler(20, max_num_seqs=3, log_stats=True))
    engine.add(*[make_request(f"r{i}", 40, 50) for i in range(10)])
    for _ in range(3):
        engine.step()
    ended = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert len(ended) == 10
    assert engine.scheduler.get_request_counts() == (0, 0)
    assert engine.scheduler.get_kv_cache_usage() == 0.0
    assert engine.scheduler.has_requests(), "the runner has to be told"
    engine.run()
    stats = engine.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)
    with pytest.raises(ValueError, match="RUNNING is no end"):
        engine.scheduler.finish_requests(None, RequestStatus.RUNNING)


def test_logprobs_are_cut_to_the_kept_tokens():
    """Each request gets its own rows, one a token that is kept, and only if it asked."""
    scheduler = make_scheduler(100)
    scheduler.add_request(make_request("a", 10, 5))
    scheduler.add_request(make_request("b", 10, 9, logprobs=1, stop_token_ids=[8]))
    step = scheduler.schedule()
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    logprobs = LogprobsLists(rows.astype(np.int32), rows, rows[:, 0].astype(np.int32), [0, 2])
    given = output_of(step, {"a": [5, 6], "b": [7, 8, 9]}, logprobs=logprobs)
    a, b = scheduler.update_from_output(step, given)[0].outputs
    assert a.new_logprobs is None
    assert b.new_token_ids == [7, 8] and b.finish_reason is FinishReason.STOP
    assert b.new_logprobs.logprobs.tolist() == rows[2:4].tolist()


def test_prompt_logprobs_reach_the_client_before_the_first_token():
    """A step that gives prompt logprobs and no token is told of."""
    scheduler = make_scheduler(100)
    scheduler.add_request(make_request("a", 10, 5, prompt_logprobs=1))
    step = scheduler.schedule()
    rows = LogprobsLists(np.zeros((9, 2), np.int32), np.zeros((9, 2)), np.zeros(9, np.int32))
    given = output_of(step, {"a": []}, prompt_logprobs_dict={"a": rows})
    (a,) = scheduler.update_from_output(step, given)[0].outputs
    assert a.new_prompt_logprobs_tensors is rows and a.new_token_ids == []


def test_events_and_prefill_stats():
    """Queued, scheduled, preempted, scheduled again; prefill stats once, with the first token."""
    engine = Engine(make_scheduler(7, log_stats=True))
    engine.add(make_request("a", 60, 40), make_request("b", 44, 40))
    engine.run()
    kinds = EngineCoreEventType
    events = [e for o in engine.outputs["b"] for e in o.events or []]
    assert [e.type for e in events] == [
        kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED, kinds.SCHEDULED,
    ]  # fmt: skip
    assert [e.timestamp for e in events] == sorted(e.timestamp for e in events)
    stats = [o.prefill_stats for o in engine.outputs["b"]]
    assert (stats[0].num_prompt_tokens, stats[0].num_cached_tokens) == (44, 0)
    assert not any(stats[1:])


def test_cached_tokens_are_told():
    """A prompt that was cached says how much of it, once."""
    engine = Engine(make_scheduler(100, log_stats=True))
    engine.add(make_request("a", list(range(2, 42))))
    engine.run()
    engine.add(make_request("b", list(range(2, 42))))
    engine.run()
    assert engine.outputs["b"][0].prefill_stats.num_cached_tokens == 32


def test_own_pages_are_no_hits_for_a_request_that_was_preempted():
    """Preempted within its prompt, it finds what it had computed itself: the client must not be
    told that this was cached."""
    engine = Engine(make_scheduler(7, long_prefill_token_threshold=20, log_stats=True))
    engine.add(make_request("a", 60, 20))
    for _ in range(5):
        engine.step()
    engine.add(make_request("b", 48, 1))
    engine.run()
    assert [r for s in engine.steps for r in s.preempted_req_ids] == ["b"]
    again = [n for s in engine.steps for n in s.scheduled_new_reqs if n.req_id == "b"][1]
    assert again.num_computed_tokens > 0
    assert engine.outputs["b"][0].prefill_stats.num_cached_tokens == 0


def test_stats():
    """Counts after a step; preemptions and look-ups since the last report."""
    scheduler = make_scheduler(7, log_stats=True)
    engine = Engine(scheduler)
    engine.add(make_request("a", 60, 40), make_request("b", 44, 40), make_request("c", 44, 1))
    step = scheduler.schedule()
    envelopes = scheduler.update_from_output(step, engine.model.run(step))
    stats = envelopes[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    assert stats.kv_cache_usage == 1.0
    assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries) == (2, 104)
    num_preempted = 0
    while scheduler.has_requests():
        step = scheduler.schedule()
        envelopes = scheduler.update_from_output(step, engine.model.run(step))
        num_preempted += next(iter(envelopes.values())).scheduler_stats.num_preempted_reqs
    assert num_preempted == 1
    assert make_scheduler(7).make_stats() is None


def test_common_prefix_is_not_claimed():
    """No backend computes a common prefix apart: zeros, one a group."""
    engine = Engine(make_scheduler(20))
    engine.add(make_request("a", 40), make_request("b", 40))
    assert engine.step().num_common_prefix_blocks == [0]


# --- Coming, going, pausing ---


def test_request_id_in_use_is_refused():
    """Two requests of one id would get each other's tokens."""
    scheduler = make_scheduler(20)
    scheduler.add_request(make_request("a", 10))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request("a", 10))


def test_pause():
    """PAUSED_NEW lets the running ones go on; PAUSED_ALL computes nothing and asks for no step;
    afterwards everything goes on where it was."""
    engine = Engine(make_scheduler(20, max_num_seqs=1))
    scheduler = engine.scheduler
    engine.add(make_request("a", 10, 5), make_request("b", 10, 5))
    engine.step()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.pause_state is PauseState.PAUSED_ALL
    assert engine.step().num_scheduled_tokens == {}
    assert not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    assert len(engine.tokens("a")) == 5 and not engine.tokens("b")
    assert scheduler.get_request_counts() == (0, 1)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.tokens("b")) == 5


def test_reset_prefix_cache():
    """Refused while requests run; if they may start over, nothing old is found and their tokens
    are kept."""
    engine = Engine(make_scheduler(20))
    engine.add(make_request("a", 40, 10))
    for _ in range(4):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    before = engine.tokens("a")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = engine.step()
    assert step.preempted_req_ids == {"a"}
    assert step.num_scheduled_tokens == {"a": 44}
    engine.run()
    assert engine.tokens("a")[:4] == before and len(engine.tokens("a")) == 10


@pytest.mark.parametrize("switch", ["0", "1"])
def test_books_are_checked_when_idle(monkeypatch: pytest.MonkeyPatch, switch: str):
    """With VLLM_DEBUG_CHECK_INTEGRITY a lost page is noticed when the last request has ended;
    without it nothing is spent on looking."""
    monkeypatch.setenv("VLLM_DEBUG_CHECK_INTEGRITY", switch)
    scheduler = make_scheduler(20)
    scheduler.add_request(make_request("a", 10, 1))
    step = scheduler.schedule()
    scheduler.kv_cache_manager.block_pool.free_block_queue.popleft()
    given = output_of(step, {"a": [5]})
    if switch == "0":
        scheduler.update_from_output(step, given)
        return
    with pytest.raises(KVCacheIntegrityError):
        scheduler.update_from_output(step, given)


def test_waiting_requests_cost_a_step_nothing():
    """10,000 waiting requests: a step looks at no more of them than it may pass over. Counted, not
    timed."""

    def looked_at(num_waiting: int, pages: int) -> int:
        scheduler = make_scheduler(pages, max_num_seqs=8)
        engine = Engine(scheduler)
        engine.add(*[make_request(f"r{i}", 100, 50) for i in range(num_waiting)])
        engine.step()
        count = 0
        lookup = scheduler.kv_cache_manager.get_computed_blocks

        def counting(request):
            nonlocal count
            count += 1
            return lookup(request)

        scheduler.kv_cache_manager.get_computed_blocks = counting
        for _ in range(5):
            engine.step()
        return count

    assert looked_at(100, pages=20) == looked_at(10_000, pages=20) > 0
    assert looked_at(100, pages=7) == 0, "no page is free, so nobody can start"

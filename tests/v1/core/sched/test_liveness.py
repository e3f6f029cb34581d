# SPDX-License-Identifier: Apache-2.0
"""Every request gets its turn and ends, however small the pool. Pages are usable ones: the null
page comes on top."""

from __future__ import annotations

import itertools

import pytest

from tests.v1.core.utils import Engine, full_spec, make_request, make_scheduler, window_spec
from vllm.v1.core.sched.look_ahead import MAX_OVERTAKEN, MAX_PASSED_OVER
from vllm.v1.engine import FinishReason

PAGE = 16


def preemptions(engine: Engine) -> list[str]:
    return [request_id for step in engine.steps for request_id in step.preempted_req_ids]


@pytest.mark.parametrize("arrive_together", [True, False])
@pytest.mark.parametrize(("budget", "threshold"), [(16, 0), (48, 0), (1024, 0), (1024, 16)])
def test_two_prompts_of_two_thirds_of_the_pool(
    budget: int, threshold: int, arrive_together: bool
):
    """Both finish, one after the other: pages that the first still needs for its prompt are
    promised to it, so the second is not let in half-way to be thrown out again."""
    engine = Engine(
        make_scheduler(12, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold)
    )
    engine.add(make_request("a", 8 * PAGE, 5))
    if not arrive_together:
        engine.step()
    engine.add(make_request("b", 8 * PAGE, 5))
    engine.run(max_steps=100)
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 5
    assert preemptions(engine) == []


def test_two_requests_that_grow_into_each_other():
    """7 pages; a needs 4 and then 1 more, b 3 and then 1 more: both finish, b makes way once."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("a", 4 * PAGE, PAGE), make_request("b", 3 * PAGE, PAGE))
    engine.run(max_steps=200)
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == PAGE
    assert preemptions(engine) == ["b"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("pages", [5, 6, 7, 9, 13])
def test_many_requests_that_grow_into_each_other(policy: str, pages: int):
    """Nobody takes turns in throwing the other out: the first in the order is never preempted, so
    the steps are bounded by what the requests need one by one."""
    engine = Engine(make_scheduler(pages, policy=policy, max_num_batched_tokens=64))
    for i in range(6):
        engine.add(make_request(f"r{i}", 20 + i, 50, priority=-i))
    engine.run(max_steps=6 * (50 + 2) + 10)
    assert all(len(engine.tokens(f"r{i}")) == 50 for i in range(6))
    assert ("r0" if policy == "fcfs" else "r5") not in preemptions(engine)


def start_with_20_free_pages(max_num_seqs: int = 16) -> Engine:
    """Of 120 pages, a request that runs for long holds 100."""
    engine = Engine(make_scheduler(120, max_model_len=4096, max_num_batched_tokens=4096,
                                   max_num_seqs=max_num_seqs))  # fmt: skip
    engine.add(make_request("long", 99 * PAGE + 1, 15))
    engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 20
    return engine


def test_small_requests_go_ahead():
    """20 pages are free; the head needs 100, those behind 5 and 10: they run now."""
    engine = start_with_20_free_pages()
    engine.add(
        make_request("head", 100 * PAGE), make_request("5", 5 * PAGE), make_request("10", 10 * PAGE)
    )
    assert set(engine.step().num_scheduled_tokens) == {"long", "5", "10"}
    engine.run()
    assert engine.finish_reason("head") is FinishReason.LENGTH


def test_deferred_requests_take_no_seat():
    """A request that waits for pages does not count against max_num_seqs."""
    engine = start_with_20_free_pages(max_num_seqs=3)
    engine.add(*[make_request(f"head{i}", 100 * PAGE) for i in range(3)])
    engine.add(make_request("5", 5 * PAGE, 5), make_request("10", 10 * PAGE, 5))
    assert set(engine.step().num_scheduled_tokens) == {"long", "5", "10"}
    engine.run()


def test_the_head_gets_its_turn_under_steady_arrivals():
    """Small requests arrive in every step and would keep the pool busy for ever: after a bounded
    number of them the head runs."""
    engine = Engine(make_scheduler(120, max_model_len=4096, max_num_batched_tokens=4096))
    engine.add(make_request("small", 30 * PAGE, 30))
    engine.step()
    engine.add(make_request("head", 100 * PAGE, 3))
    for i in itertools.count():
        engine.add(make_request(f"s{i}", 9 * PAGE, 4))
        if "head" in engine.step().num_scheduled_tokens:
            break
        assert i < 10 * MAX_OVERTAKEN, "the head starves"
    overtook = {new.req_id for step in engine.steps for new in step.scheduled_new_reqs}
    assert MAX_OVERTAKEN / 2 < len(overtook) <= MAX_OVERTAKEN + 2
    engine.run()


def test_every_waiting_request_is_overtaken_a_bounded_number_of_times():
    """Not only the head: whoever waits behind it and does not fit either."""
    engine = start_with_20_free_pages()
    heads = [make_request(f"head{i}", 100 * PAGE, 2) for i in range(3)]
    engine.add(*heads)
    for i in range(2 * MAX_OVERTAKEN):
        engine.add(*[make_request(f"s{i}.{j}", PAGE - 2, 2) for j in range(7)])
        engine.step()
        assert all(head.num_overtaken <= MAX_OVERTAKEN for head in heads)
    engine.run()
    assert all(len(engine.tokens(head.request_id)) == 2 for head in heads)


def test_look_ahead_is_bounded():
    """A step passes over a few requests only: one that would fit behind them waits."""
    engine = start_with_20_free_pages()
    engine.add(*[make_request(f"head{i}", 100 * PAGE) for i in range(MAX_PASSED_OVER)])
    engine.add(make_request("5", 5 * PAGE))
    assert set(engine.step().num_scheduled_tokens) == {"long"}
    engine.run()
    assert engine.finish_reason("5") is FinishReason.LENGTH


# --- What can never fit ends with a reason ---


def test_prompt_that_can_never_fit():
    """It is told so at once, in words that help, and its neighbours do not notice."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("a", 40, 5), make_request("big", 8 * PAGE, 5))
    assert engine.scheduler.get_request_counts() == (0, 1)
    engine.step()
    (told,) = engine.outputs["big"]
    assert told.finish_reason is FinishReason.ERROR
    for words in ("128 of prompt", "7 pages of 16 tokens", "at most 112", "--num-gpu-blocks-"):
        assert words in told.error_message
    engine.run()
    assert len(engine.tokens("a")) == 5


def test_hopeless_request_alone_wakes_the_engine():
    """With nothing else to do a step must still be due, or its client waits for ever."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("big", 8 * PAGE, 5))
    assert engine.scheduler.has_requests()
    engine.run(max_steps=2)
    assert engine.finish_reason("big") is FinishReason.ERROR
    assert engine.model.finished == {"big"}


def test_prompt_of_exactly_the_pool():
    """It fits, and so does the token sampled from it, which needs no page."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("a", 7 * PAGE, 1))
    engine.run()
    assert engine.finish_reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("neighbours", [0, 3])
def test_running_request_that_outgrows_the_pool(neighbours: int):
    """It gets all the pages there are, then an error with what it generated so far: no loop, and
    the others finish. Nobody makes way for a page that cannot help."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("big", 40, 500))
    engine.add(*[make_request(f"r{i}", 20, 30) for i in range(neighbours)])
    engine.run(max_steps=400)
    last = engine.outputs["big"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert len(engine.tokens("big")) == 7 * PAGE - 40 + 1
    assert f"{7 * PAGE - 40 + 1} generated" in last.error_message
    assert "big" not in preemptions(engine)
    end = next(s for s in engine.steps if "big" in s.finished_req_ids)
    assert not end.preempted_req_ids
    assert all(len(engine.tokens(f"r{i}")) == 30 for i in range(neighbours))


def test_young_request_that_outgrows_the_pool_waits_for_the_old():
    """The one that can never fit is the last in the order: it makes way until it is alone, and
    only then fails."""
    engine = Engine(make_scheduler(7))
    engine.add(make_request("a", 20, 60), make_request("big", 40, 500))
    engine.run(max_steps=400)
    assert len(engine.tokens("a")) == 60
    assert engine.finish_reason("big") is FinishReason.ERROR
    assert len(engine.tokens("big")) == 7 * PAGE - 40 + 1


def test_prompt_longer_than_the_model_or_the_step():
    """Refused by the front; if one comes through, it ends with a reason."""
    engine = Engine(
        make_scheduler(
            99, max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False
        )
    )
    engine.add(make_request("a", 65))
    engine.run()
    assert "max_model_len is 64" in engine.outputs["a"][-1].error_message


def test_window_request_that_cannot_start_over():
    """With a sliding window a request may go on where it could not start over, since a chunk needs
    more pages than a token. Preempted, it ends with an error; it must not wait for ever."""
    config = {"max_num_batched_tokens": 80, "max_model_len": 4096, "policy": "priority"}
    engine = Engine(make_scheduler(6, window_spec(40), **config))
    engine.add(make_request("low", 20, 300, priority=1))
    for _ in range(100):
        engine.step()
    engine.add(make_request("high", 20, 70, priority=0))
    engine.run(max_steps=200)
    assert len(engine.tokens("high")) == 70
    assert engine.finish_reason("low") is FinishReason.ERROR
    assert preemptions(engine) == ["low"]
    # Alone it would have come to its end.
    alone = Engine(make_scheduler(6, window_spec(40), **config))
    alone.add(make_request("low", 20, 300))
    alone.run()
    assert len(alone.tokens("low")) == 300


def test_hybrid_pool_of_just_enough():
    """Full attention and a window over one pool that holds one request at a time."""
    engine = Engine(
        make_scheduler(14, full_spec(), window_spec(32), max_num_batched_tokens=32)
    )
    engine.add(*[make_request(f"r{i}", 100, 40) for i in range(4)])
    engine.run(max_steps=500)
    assert all(len(engine.tokens(f"r{i}")) == 40 for i in range(4))

# SPDX-License-Identifier: Apache-2.0
"""Keys and values from elsewhere: each state that a request can be in, and each way out of it."""

from __future__ import annotations

import pytest

from tests.v1.core.sched.transfers import Plan, ask, make_engine
from tests.v1.core.utils import NO_GOOD, cross_spec, full_spec, make_feature, window_spec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.look_ahead import MAX_NOT_YET
from vllm.v1.core.sched.remote_kv import LOSS_MESSAGE
from vllm.v1.core.sched.request_queue import ASKED_AT_ONCE
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

PROMPT = [7] * 40


def all_free(engine) -> bool:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_usable_blocks


def test_a_load_holds_nobody_up():
    """While its pages are loaded, those behind it run; then it computes its last token alone."""
    engine = make_engine(20)
    slow = ask(engine, Plan(num_tokens=40, num_steps=3), "slow", PROMPT, 2)
    ask(engine, Plan(), "quick", 20, 2)
    first = engine.step()
    assert slow.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert list(first.num_scheduled_tokens) == ["quick"]
    assert engine.scheduler.get_request_counts() == (1, 1)
    engine.run()
    assert engine.finish_reason("slow") is engine.finish_reason("quick") is FinishReason.LENGTH
    step = next(s for s in engine.steps if "slow" in s.num_scheduled_tokens)
    assert step.num_scheduled_tokens["slow"] == 1
    assert engine.outputs["slow"][0].prefill_stats.num_cached_tokens == 39
    assert all_free(engine)


def test_steps_go_on_while_something_is_on_its_way():
    """Guards against an engine that falls asleep with transfers under way, and one that stays awake
    for ever."""
    engine = make_engine(20)
    ask(engine, Plan(num_tokens=40, num_steps=5, keep_steps=4), "r", PROMPT, 1)
    engine.step()
    assert engine.scheduler.has_requests() and engine.scheduler.has_unfinished_requests()
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.has_requests() and not all_free(engine)
    engine.run()
    assert all_free(engine)


def test_params_of_the_output():
    """What the connector says at the end goes to the client with the last output, once."""
    engine = make_engine(20)
    ask(engine, Plan(keep_steps=0), "r", PROMPT, 3)
    engine.run()
    told = [output.kv_transfer_params for output in engine.outputs["r"]]
    assert told[:-1] == [None, None]
    assert [len(ids) for ids in told[-1]["remote_block_ids"]] == [3]


def test_kept_pages_go_to_nobody_else():
    """A pool in which the next request needs the pages that a peer still reads: it waits."""
    engine = make_engine(4)
    ask(engine, Plan(keep_steps=6), "first", 40, 1)
    ask(engine, Plan(), "second", 40, 1)
    engine.run()
    begin = next(i for i, s in enumerate(engine.steps) if "second" in s.num_scheduled_tokens)
    assert begin >= 6
    assert engine.finish_reason("second") is FinishReason.LENGTH


def test_ask_again_later_holds_nobody_up():
    """However many wait for the connector's word, and however often they are asked."""
    engine = make_engine(20)
    for i in range(12):
        ask(engine, Plan(num_refusals=200), f"later {i}", 20, 1)
    for i in range(100):
        ask(engine, Plan(), f"now {i}", 4, 1)
    for _ in range(60):
        engine.step()
    ended = [name for name, outputs in engine.outputs.items() if outputs]
    assert len([name for name in ended if name.startswith("now")]) == 100
    engine.run()
    assert engine.finish_reason("later 0") is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 5])
def test_abort_while_loading(num_steps):
    """Its pages are being written to: they are nobody else's until the load is over, and its id may
    not be used again until then."""
    engine = make_engine(4)
    ask(engine, Plan(num_tokens=40, num_steps=num_steps), "r", PROMPT, 1)
    engine.step()
    if num_steps == 0:
        assert engine.scheduler.remote_kv.loaded
    assert engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert all_free(engine) == (num_steps == 0)
    if num_steps:
        with pytest.raises(ValueError, match="in use"):
            ask(engine, Plan(), "r", PROMPT, 1)
    ask(engine, Plan(), "next", 40, 1)
    engine.run()
    assert engine.finish_reason("next") is FinishReason.LENGTH
    assert engine.outputs["r"] == [] and all_free(engine)


def test_abort_in_every_other_state():
    """Waiting, told to ask later, running, and ended with pages kept: the connector is told once."""
    engine = make_engine(8)
    ask(engine, Plan(num_refusals=99), "later", 20, 1)
    ask(engine, Plan(), "running", 20, 50)
    ask(engine, Plan(keep_steps=5), "kept", 20, 1)
    engine.step()
    names = ["later", "running", "kept"]
    ended = engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in ended] == ["later", "running"]
    engine.run()
    assert sorted(engine.scheduler.get_kv_connector().finished) == sorted(names)
    assert all_free(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_recompute(is_async, caching):
    """The page of tokens 16 to 31 is not loaded: the request computes it and what follows, finds what
    was loaded before it if pages are cached, and the connector is not asked again."""
    engine = make_engine(20, enable_prefix_caching=caching)
    plan = Plan(num_tokens=40, is_async=is_async, failing_page=1)
    ask(engine, plan, "r", PROMPT, 2)
    engine.run()
    computed = sum(s.num_scheduled_tokens.get("r", 0) for s in engine.steps)
    wasted = 0 if is_async else 1
    assert computed == wasted + (24 if caching else 40) + 1
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert len(engine.tokens("r")) == 2
    assert not engine.scheduler.get_kv_connector()._metadata.loads
    assert all_free(engine)


@pytest.mark.parametrize("is_async", [False, True])
def test_fail(is_async):
    """The client learns why, and that it is not at fault; its neighbour goes on."""
    engine = make_engine(20, policy="fail")
    plan = Plan(num_tokens=40, is_async=is_async, failing_page=1)
    ask(engine, plan, "r", PROMPT, 2)
    ask(engine, Plan(), "other", 20, 5)
    engine.run()
    (last,) = engine.outputs["r"]
    assert last.finish_reason is FinishReason.ERROR and last.is_engine_fault
    assert last.error_message == LOSS_MESSAGE and not last.new_token_ids
    assert len(engine.tokens("other")) == 5
    assert all_free(engine)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_shares_a_lost_page_loses_it_too(policy):
    """Three requests of one step begin alike; the first loads that beginning, in vain. The others took
    its pages for good, and computed their own from them: nothing of that may be kept or told."""
    engine = make_engine(30, policy=policy)
    plan = Plan(num_tokens=32, is_async=False, failing_page=0)
    for name, last in (("a", 8), ("b", 9), ("c", 8)):
        ask(engine, plan if name == "a" else Plan(), name, [7] * 32 + [last] * 20, 3)
    engine.step()
    assert engine.model.discarded == {"a", "b", "c"}
    assert not any(output.new_token_ids for name in "abc" for output in engine.outputs[name])
    ask(engine, Plan(), "later", [7] * 32 + [8] * 20, 3)
    engine.run()
    assert engine.finish_reason("later") is FinishReason.LENGTH
    wanted = FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR
    assert {engine.finish_reason(name) for name in "abc"} == {wanted}


def test_whole_prompt_in_a_window():
    """All tokens are loaded but the last is computed again: its window begins one token earlier than
    that of the next one, and that token may be the last of its page."""
    for length in range(17, 60):
        engine = make_engine(40, full_spec(4), window_spec(10, 4))
        plan = Plan(num_tokens=length)
        ask(engine, plan, "r", length, 3, hash_block_size=4)
        engine.run()
        assert engine.finish_reason("r") is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True])
def test_encoder_output_is_loaded_with_the_tokens(is_async):
    """The encoder does not run; who asks for the same input afterwards finds its pages."""
    engine = make_engine(30, full_spec(4), cross_spec(4))
    features = [make_feature("picture", 11)]
    plan = Plan(num_tokens=9, is_async=is_async)
    ask(engine, plan, "r", [3] * 9, 2, hash_block_size=4, mm_features=features)
    engine.run()
    ask(engine, Plan(), "same", [4] * 5, 2, hash_block_size=4, mm_features=features)
    engine.run()
    assert engine.model.encoded == []
    assert engine.finish_reason("same") is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True])
def test_lost_encoder_output_is_made_anew(is_async):
    """Everything depends on it: nothing that was loaded counts, and the encoder runs."""
    engine = make_engine(30, full_spec(4), cross_spec(4))
    features = [make_feature("picture", 11)]
    # Pages are counted over the groups: two or three of tokens come first.
    plan = Plan(num_tokens=9, is_async=is_async, failing_page=4)
    ask(engine, plan, "r", [3] * 9, 2, hash_block_size=4, mm_features=features)
    engine.run()
    assert engine.model.encoded == ["picture"]
    computed = sum(s.num_scheduled_tokens.get("r", 0) for s in engine.steps)
    assert computed == (0 if is_async else 1) + 9 + 1


@pytest.mark.parametrize("is_async", [False, True])
def test_encoder_output_that_others_hold_is_not_loaded_again(is_async):
    """The pages have their content, and a peer reads them: a load that fails must not touch them."""
    engine = make_engine(30, full_spec(4), cross_spec(4))
    features = [make_feature("picture", 11)]
    ask(engine, Plan(keep_steps=6), "first", [3] * 9, 1, hash_block_size=4, mm_features=features)
    engine.step()
    for page in range(6):
        plan = Plan(num_tokens=5, is_async=is_async, failing_page=page)
        ask(engine, plan, f"r{page}", [4 + page] * 9, 2, hash_block_size=4, mm_features=features)
    engine.run()
    assert engine.model.encoded == ["picture"]
    assert all(engine.finish_reason(f"r{page}") is FinishReason.LENGTH for page in range(6))


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_beside_an_input_that_cannot_be_encoded(policy, num_steps):
    """It found, in the same step, the pages that were to be written for that input, and its load may
    end with that step. Guards against a request that goes on over pages which nobody wrote."""
    engine = make_engine(30, full_spec(4), cross_spec(4), policy=policy)
    engine.model.unencodable = {"bad"}
    features = [make_feature("bad", 11)]
    ask(engine, Plan(), "first", [3] * 9, 4, hash_block_size=4, mm_features=features)
    plan = Plan(num_tokens=5, num_steps=num_steps)
    ask(engine, plan, "loads", [4] * 9, 4, hash_block_size=4, mm_features=features)
    ask(engine, plan, "fine", [5] * 9, 4, hash_block_size=4, mm_features=[make_feature("good", 7)])
    engine.run()
    assert engine.outputs["first"][-1].error_message == NO_GOOD
    assert engine.outputs["loads"][-1].error_message == (
        NO_GOOD if policy == "recompute" else LOSS_MESSAGE
    )
    assert len(engine.tokens("fine")) == 4 and not engine.tokens("loads")
    assert all_free(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_requests_that_wait_for_something_else(policy):
    """A step asks a few of them, and is no slower for the rest; nobody waits behind them for long,
    each of them is asked again, and can be aborted. Guards against a step that asks all."""
    engine = make_engine(40, policy_of_scheduling=policy, max_num_seqs=4)
    connector = engine.scheduler.get_kv_connector()
    for i in range(1000):
        ask(engine, Plan(num_refusals=10**9), f"r{i}", 20, 1)
    ask(engine, Plan(), "behind", 20, 1)
    for num_steps in range(1, 1001):
        before = sum(connector.num_asked.values())
        engine.step()
        assert sum(connector.num_asked.values()) - before <= MAX_NOT_YET
        if engine.finish_reason("behind"):
            break
    assert num_steps < 50
    assert engine.scheduler.get_request_counts() == (0, 1000)
    connector.plans["r700"] = connector.plans["r0"] = Plan()
    engine.step()
    assert engine.finish_reason("r0") is FinishReason.LENGTH
    for _ in range(1000 // ASKED_AT_ONCE):
        engine.step()
    assert engine.finish_reason("r700") is FinishReason.LENGTH
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not engine.scheduler.get_num_unfinished_requests()
    engine.step()
    assert all_free(engine)


def test_a_seat_beside_requests_that_wait_for_something_else():
    """A seat that becomes free is taken in the next step, though steps before were full. Guards
    against full steps that bring requests back into the queue which nobody asks then."""
    engine = make_engine(400, max_num_seqs=4)
    for i in range(3):
        ask(engine, Plan(), f"long{i}", 20, 10**3)
    for i in range(1000):
        ask(engine, Plan(num_refusals=10**9), f"r{i}", 20, 1)
    for i in range(20):
        ask(engine, Plan(), f"behind{i}", 20, 3)
    while not engine.finish_reason("behind0"):
        engine.step()
    for _ in range(3 * 19):
        engine.step()
    assert engine.finish_reason("behind19") is FinishReason.LENGTH


def test_prompt_logprobs_need_the_whole_prompt():
    """A request that asks for something about each prompt token computes each of them."""
    engine = make_engine(20)
    ask(engine, Plan(num_tokens=40), "r", PROMPT, 1, prompt_logprobs=0)
    engine.run()
    assert sum(s.num_scheduled_tokens.get("r", 0) for s in engine.steps) == 40


def test_loads_do_not_take_all_seats():
    """There are as many loads as seats, at most; those that wait get one as it becomes free."""
    engine = make_engine(100, max_num_seqs=2)
    for i in range(6):
        ask(engine, Plan(num_tokens=40, num_steps=3), f"r{i}", 40, 4)
    most = 0
    while engine.scheduler.has_requests():
        engine.step()
        most = max(most, len(engine.scheduler.remote_kv.requests))
    assert most == 2
    assert all(engine.finish_reason(f"r{i}") is FinishReason.LENGTH for i in range(6))


def test_two_half_loaded_requests_in_a_full_pool():
    """Each has a part of its prompt and no page for the rest: one gives its pages back."""
    engine = make_engine(6)
    for name in "ab":
        ask(engine, Plan(num_tokens=32, num_steps=2), name, 48, 20)
    engine.run(max_steps=500)
    assert {engine.finish_reason(name) for name in "ab"} == {FinishReason.LENGTH}
    assert all_free(engine)


def test_paused():
    """Transfers go on, nothing is admitted, and nothing that is loaded starts."""
    engine = make_engine(20)
    ask(engine, Plan(num_tokens=40, num_steps=2), "r", PROMPT, 1)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(10):
        if engine.scheduler.has_requests():
            assert not engine.step().num_scheduled_tokens
    assert engine.scheduler.remote_kv.loaded and not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.finish_reason("r") is FinishReason.LENGTH


def test_a_connector_of_one_group_and_a_model_of_two(monkeypatch):
    """Refused at start: pages of the second group would silently stay behind."""
    from tests.v1.core.sched import transfers

    class OneGroup(transfers.KVConnectorBase_V1):
        __abstractmethods__ = frozenset()

    monkeypatch.setattr(transfers, "TimedConnector", OneGroup)
    with pytest.raises(ValueError, match="one KV cache group and the model has 2.*SupportsHMA"):
        make_engine(20, full_spec(4), window_spec(10, 4))

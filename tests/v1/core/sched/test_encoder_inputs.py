# SPDX-License-Identifier: Apache-2.0
"""Encoder inputs: pages by their real length, one pass of the encoder for requests with the same
input, and every request gets its turn, whatever a step's encoder budget is."""

from __future__ import annotations

import pytest

from tests.v1.core.sched import transfers
from tests.v1.core.utils import (
    Engine,
    cross_spec,
    full_spec,
    make_feature,
    make_request,
    make_scheduler,
    window_spec,
)
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

CROSS = 1


def make_engine(usable_pages: int = 400, *, specs=None, **config) -> Engine:
    specs = specs or (full_spec(), cross_spec())
    return Engine(make_scheduler(usable_pages, *specs, log_stats=True, **config))


def with_input(
    name: str, identifier: str, num_encoder_tokens: int, prompt: int | list[int] = 5, **options
) -> Request:
    feature = make_feature(identifier, num_encoder_tokens)
    return make_request(name, prompt, options.pop("max_tokens", 3), mm_features=[feature], **options)


def num_free(engine: Engine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(1, 1), (16, 1), (17, 2), (1024, 64), (1500, 94)]
)
def test_pages_by_the_real_length(num_tokens: int, num_pages: int, budget: int):
    """ceil(n / 16) pages, whatever a step's token budget is, and all come back."""
    engine = make_engine(max_num_batched_tokens=budget)
    before = num_free(engine)
    engine.add(with_input("a", "x", num_tokens))
    (new,) = engine.step().scheduled_new_reqs
    assert len(new.block_ids[CROSS]) == num_pages
    engine.run()
    assert num_free(engine) == before


@pytest.mark.parametrize("caching", [True, False])
def test_one_pass_for_requests_side_by_side(caching: bool):
    """The same input in one step and later, while one that has it runs: the encoder runs once, and
    the pages are the same."""
    engine = make_engine(enable_prefix_caching=caching)
    engine.add(with_input("a", "x", 40, max_tokens=9), with_input("b", "x", 40))
    step = engine.step()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    engine.add(with_input("c", "x", 40))
    step = engine.step()
    assert step.scheduled_encoder_inputs == {} and step.free_encoder_mm_hashes == ["x"]
    tables = {tuple(engine.model.block_ids[name][CROSS]) for name in "abc"}
    assert len(tables) == 1
    engine.run()
    assert engine.model.encoded == ["x"]


@pytest.mark.parametrize("caching", [True, False])
def test_found_again_while_cached(caching: bool):
    """After its holder has ended the content is found, if prefix caching is on."""
    engine = make_engine(enable_prefix_caching=caching)
    for name in "ab":
        engine.add(with_input(name, "x", 40))
        engine.run()
    assert engine.model.encoded == (["x"] if caching else ["x", "x"])


def test_a_part_is_not_enough():
    """Some of the pages have been reused: the input is encoded again, into pages of its own."""
    engine = make_engine(usable_pages=12)
    engine.add(with_input("a", "x", 64))
    engine.run()
    engine.add(make_request("b", 64, 60, mm_features=[make_feature("y", 16)]))
    engine.run()
    pool = engine.scheduler.kv_cache_manager.block_pool
    known = [block for _, block in pool.cached_block_hash_to_block.items()]
    assert any(b"encoder" in block.block_hash and block.ref_cnt == 0 for block in known)
    engine.add(with_input("c", "x", 64))
    engine.run()
    assert engine.model.encoded == ["x", "y", "x"]


def test_what_separates_inputs():
    """Another input, and the same one under another salt, are encoded by themselves."""
    engine = make_engine()
    engine.add(with_input("a", "x", 20), with_input("b", "y", 20))
    engine.add(with_input("c", "x", 20, cache_salt="s"), with_input("d", "x", 20, cache_salt="s"))
    assert set(engine.step().scheduled_encoder_inputs) == {"a", "b", "c"}


def test_decoder_prefixes_belong_to_their_input():
    """The same decoder prompt under another encoder input is another prefix: self-attention of the
    second layer on depends on what cross-attention of the first saw."""
    prompt = list(range(2, 50))
    engine = make_engine()
    for name, identifier in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add(with_input(name, identifier, 20, prompt))
        engine.run()
    hits = {new.req_id: new.num_computed_tokens
            for step in engine.steps for new in step.scheduled_new_reqs}  # fmt: skip
    assert hits == {"a": 0, "b": 0, "c": 32}


def test_a_decoder_hit_does_not_replace_the_encoder():
    """The decoder's prompt is found but the encoder's pages are gone: it is encoded."""
    prompt = list(range(2, 50))
    engine = make_engine()
    engine.add(with_input("a", "x", 40, prompt))
    engine.run()
    pool = engine.scheduler.kv_cache_manager.block_pool
    lost = {b.block_id for b in pool.blocks if b.block_hash and b"encoder" in b.block_hash}
    pool.evict_blocks(lost)
    engine.add(with_input("b", "x", 40, prompt))
    step = engine.step()
    assert step.scheduled_new_reqs[0].num_computed_tokens == 32
    assert step.scheduled_encoder_inputs == {"b": [0]}


def test_prompt_logprobs_share_the_encoder():
    """A prompt that must be computed whole still needs no second pass of the encoder."""
    engine = make_engine()
    engine.add(with_input("a", "x", 40), with_input("b", "x", 40, prompt_logprobs=1))
    engine.run()
    assert engine.model.encoded == ["x"]


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_encode_again_or_find_it(caching: bool):
    """What a preempted request attends to is there when it resumes (the stand-in model looks)."""
    engine = make_engine(usable_pages=14, enable_prefix_caching=caching)
    engine.add(*[with_input(f"r{i}", f"x{i}", 33, 10, max_tokens=60) for i in range(3)])
    engine.run()
    assert any(step.preempted_req_ids for step in engine.steps)
    assert all(len(engine.tokens(f"r{i}")) == 60 for i in range(3))
    assert len(engine.model.encoded) > 3 or caching


def test_a_step_keeps_to_its_encoder_budget():
    """Inputs of mixed length: no step encodes more than its budget but for a single input, smaller
    ones go ahead of one that does not fit any more, and none waits for ever."""
    engine = make_engine(max_num_batched_tokens=64)
    lengths = [40, 30, 20, 64, 1, 200, 5]
    engine.add(*[with_input(f"r{i}", f"x{i}", n) for i, n in enumerate(lengths)])
    engine.run()
    encoded = [[lengths[int(name[1:])] for name in step.scheduled_encoder_inputs]
               for step in engine.steps]  # fmt: skip
    assert all(sum(step) <= 64 or len(step) == 1 for step in encoded)
    assert sorted(n for step in encoded for n in step) == sorted(lengths)
    assert encoded[0] == [40, 20, 1]


def test_two_inputs_that_never_fit_together():
    """Each is more than half the budget: one after the other. Each is more than the whole budget:
    likewise. Nobody holds room while it waits."""
    for num_tokens in (40, 200):
        engine = make_engine(max_num_batched_tokens=64)
        engine.add(with_input("a", "x", num_tokens), with_input("b", "y", num_tokens))
        engine.run(max_steps=20)
        assert engine.model.encoded == ["x", "y"]


def test_two_inputs_too_large_for_the_pool_together():
    """Pages for one of them: they run one after the other, preempted or not."""
    engine = make_engine(usable_pages=12)
    engine.add(with_input("a", "x", 150), with_input("b", "y", 150))
    engine.run(max_steps=40)
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(mm_features=[make_feature("x", 6400)]), "beside 6400 of encoder input"),
        (dict(mm_features=[make_feature("x", 1025)]), "the model's encoder takes 1024"),
        (dict(), "has no encoder input"),
    ],
)
def test_refused_with_the_reason(options: dict, reason: str):
    """Inputs that can never run: larger than the pool, than the encoder, or none at all."""
    specs = (full_spec(), cross_spec(16, 1024))
    engine = make_engine(usable_pages=100, specs=specs)
    engine.add(make_request("a", 5, 3, **options), with_input("b", "y", 20))
    engine.run(max_steps=20)
    assert engine.finish_reason("a") is FinishReason.ERROR
    assert reason in engine.outputs["a"][-1].error_message
    assert len(engine.tokens("b")) == 3


def test_a_model_without_an_encoder():
    """Inputs that nothing would look at are refused, not dropped."""
    engine = make_engine(specs=(full_spec(),))
    engine.add(with_input("a", "x", 20))
    engine.run()
    assert engine.outputs["a"][-1].error_message == "the model has no encoder for its inputs"


def test_several_inputs_of_a_request():
    """All of a request's inputs are encoded in one step, though together they are more than its
    budget; a request that shares only some of them shares nothing."""
    engine = make_engine(max_num_batched_tokens=64)
    features = {n: make_feature(n, 40) for n in "xyz"}
    engine.add(make_request("a", 5, 3, mm_features=[features["x"], features["y"]]))
    engine.add(make_request("b", 5, 3, mm_features=[features["x"], features["z"]]))
    engine.add(make_request("c", 5, 3, mm_features=[features["x"], features["y"]]))
    engine.run(max_steps=20)
    assert engine.steps[0].scheduled_encoder_inputs == {"a": [0, 1]}
    assert engine.model.encoded == ["x", "y", "x", "z"]


def test_prompts_in_chunks():
    """The encoder runs with the first chunk; later ones find what it left."""
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
    engine.add(with_input("a", "x", 40, 60), with_input("b", "x", 40, 60))
    engine.run()
    assert engine.model.encoded == ["x"] and engine.steps[0].scheduled_encoder_inputs == {"a": [0]}


def test_several_cross_attention_groups():
    """All groups have the content, or none counts."""
    specs = (cross_spec(), window_spec(20), cross_spec(32))
    engine = make_engine(specs=specs)
    engine.add(with_input("a", "x", 40), with_input("b", "x", 40))
    step = engine.step()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    assert [len(ids) for ids in step.scheduled_new_reqs[0].block_ids] == [3, 1, 2]
    engine.run()
    pool = engine.scheduler.kv_cache_manager.block_pool
    (lost, *_) = [b for b in pool.blocks if b.block_hash and b"encoder" in b.block_hash]
    pool.evict_blocks({lost.block_id})
    engine.add(with_input("c", "x", 40))
    engine.run()
    assert engine.model.encoded == ["x", "x"]


def test_aborted_requests_leave_what_others_hold():
    """The request that was encoded for goes away; the one that shares its pages goes on."""
    engine = make_engine(enable_prefix_caching=False)
    engine.add(with_input("a", "x", 40, max_tokens=50), with_input("b", "x", 40, max_tokens=9))
    engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.add(with_input("c", "x", 40))
    engine.run()
    assert engine.model.encoded == ["x"] and len(engine.tokens("b")) == 9


def test_passes_and_hits_are_counted():
    """What Prometheus shows: inputs that were encoded and inputs that were found."""
    engine = make_engine()
    engine.add(*[with_input(f"r{i}", "x", 40) for i in range(4)], with_input("y", "y", 10))
    step = engine.scheduler.schedule()
    outputs = engine.scheduler.update_from_output(step, engine.model.run(step))
    stats = outputs[0].scheduler_stats.encoder_stats
    assert (stats.num_encoded, stats.num_found) == (2, 3)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_connector_loads_is_no_hit(is_async):
    """Encoder output that came with the tokens was neither encoded nor in the cache; when the next
    request finds it there, it was."""
    engine = transfers.make_engine(40, full_spec(), cross_spec())
    plan = transfers.Plan(num_tokens=32, is_async=is_async)
    feature = make_feature("x", 20)
    transfers.ask(engine, plan, "a", [7] * 40, 1, mm_features=[feature])
    assert _counted(engine) == (0, 0)
    engine.add(with_input("b", "x", 20))
    assert _counted(engine) == (0, 1) and engine.model.encoded == []


def _counted(engine: Engine) -> tuple[int, int]:
    """Runs all requests; inputs that were encoded, and found."""
    counted = []
    while engine.scheduler.has_requests():
        step = engine.scheduler.schedule()
        outputs = engine.scheduler.update_from_output(step, engine.model.run(step))
        counted += [o.scheduler_stats.encoder_stats for o in outputs.values() if o.scheduler_stats]
    return sum(one.num_encoded for one in counted), sum(one.num_found for one in counted)


@pytest.mark.parametrize("caching", [True, False])
def test_an_input_that_cannot_be_encoded(caching: bool):
    """The requests that have it end with the reason, as the engine's fault; others go on; their pages
    are free and found by nobody: the same input is encoded when it is asked for again."""
    engine = make_engine(usable_pages=40, enable_prefix_caching=caching)
    free = num_free(engine)
    engine.model.unencodable = {"bad"}
    engine.add(*[with_input(name, "bad", 40, [5] * 20) for name in "ab"], with_input("c", "y", 10))
    engine.run()
    for name in "ab":
        (last,) = engine.outputs[name]
        assert last.finish_reason is FinishReason.ERROR and not last.new_token_ids
        assert last.error_message == "no good" and last.is_engine_fault
    assert len(engine.tokens("c")) == 3 and num_free(engine) == free
    engine.model.unencodable = set()
    engine.model.encoded.clear()
    engine.add(with_input("again", "bad", 40, [5] * 20))
    engine.run()
    assert engine.model.encoded == ["bad"] and len(engine.tokens("again")) == 3

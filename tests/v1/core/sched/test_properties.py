# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, in whatever order, in however small a pool: the scheduler's promises hold in
every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.v1.core.utils import (
    Engine,
    cross_spec,
    full_spec,
    make_feature,
    make_request,
    make_scheduler,
    window_spec,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

PAGE = 4
MAX_MODEL_LEN = 96
MAX_ENCODER_LEN = 40
GROUPS = {
    "full": (full_spec(PAGE),),
    "window": (window_spec(10, PAGE),),
    "hybrid": (full_spec(PAGE), window_spec(10, PAGE)),
    "unequal": (full_spec(PAGE), window_spec(17, 2 * PAGE), window_spec(6, 2 * PAGE)),
    "encoder": (full_spec(PAGE), cross_spec(PAGE, MAX_ENCODER_LEN)),
    "encoders": (cross_spec(PAGE, MAX_ENCODER_LEN), window_spec(10, PAGE), cross_spec(2 * PAGE)),
}
PREFIXES = [[2 + i] * 30 for i in range(3)]
ENCODER_LENGTHS = (1, PAGE, PAGE + 1, 17, MAX_ENCODER_LEN)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that share beginnings arrive, run, are preempted, aborted and paused, over a
    stand-in model that draws random tokens and checks what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None

    @initialize(
        pages=st.integers(4, 40),
        groups=st.sampled_from(sorted(GROUPS)),
        budget=st.sampled_from([8, 13, 32, MAX_MODEL_LEN]),
        max_num_seqs=st.integers(1, 6),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 5]),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def start(self, pages, groups, budget, max_num_seqs, caching, chunked, policy, threshold,
              watermark):  # fmt: skip
        self.budget = budget if chunked else MAX_MODEL_LEN
        self.max_num_seqs = max_num_seqs
        self.has_encoder = groups.startswith("encoder")
        scheduler = make_scheduler(
            pages,
            *GROUPS[groups],
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=self.budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            policy=policy,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            log_stats=True,
        )
        self.engine = Engine(scheduler, seed=pages)
        self.requests = {}
        self.aborted: set[str] = set()

    @rule(
        prefix=st.integers(0, 2),
        num_shared=st.integers(0, 30),
        num_own=st.integers(1, 40),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 2),
        may_stop=st.booleans(),
        encoder_input=st.sampled_from(ENCODER_LENGTHS),
        is_shared=st.booleans(),
    )
    def arrive(self, prefix, num_shared, num_own, max_tokens, priority, may_stop, encoder_input,
               is_shared):  # fmt: skip
        name = f"r{len(self.requests)}"
        identifier = f"{encoder_input}" if is_shared else name
        feature = make_feature(identifier, encoder_input)
        own = [100 + len(self.requests)] * num_own
        request = make_request(
            name,
            PREFIXES[prefix][:num_shared] + own,
            max_tokens,
            hash_block_size=PAGE,
            priority=priority,
            arrival_time=0.0,
            stop_token_ids=list(range(0, 1000, 20)) if may_stop else [],
            mm_features=[feature] if self.has_encoder else None,
        )
        self.requests[name] = request
        self.engine.add(request)

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.check_step(self.engine.step())

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            ended = self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.aborted |= {request.request_id for request in ended}

    @rule(state=st.sampled_from(PauseState))
    def pause_for_a_step(self, state):
        self.engine.scheduler.set_pause_state(state)
        step = self.engine.step()
        self.check_step(step)
        assert state is PauseState.UNPAUSED or not step.scheduled_new_reqs
        assert state is not PauseState.PAUSED_ALL or not step.num_scheduled_tokens
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule()
    def start_over(self):
        assert self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def check_step(self, step):
        """Budget and seats are kept, and no two requests write to one page. (That what is read was
        written is the stand-in model's to check.)"""
        scheduler = self.engine.scheduler
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        assert step.total_num_scheduled_tokens <= self.budget
        assert all(n > 0 for n in step.num_scheduled_tokens.values())
        assert len(scheduler.running) <= self.max_num_seqs
        encoded = [self.requests[name].mm_features[0] for name in step.scheduled_encoder_inputs]
        assert len({feature.identifier for feature in encoded}) == len(encoded)
        num_encoded = sum(feature.mm_position.length for feature in encoded)
        assert num_encoded <= max(self.budget, MAX_ENCODER_LEN)
        written: set[int] = set()
        for name, num_tokens in step.num_scheduled_tokens.items():
            end = self.requests[name].num_computed_tokens
            for group_id, manager in enumerate(scheduler.kv_cache_manager.single_type_managers):
                if isinstance(manager, CrossAttentionManager):
                    continue  # requests with the same encoder input share all pages
                size = manager.block_size
                table = self.engine.model.block_ids[name][group_id]
                pages = set(table[(end - num_tokens) // size : (end - 1) // size + 1])
                assert not pages & written
                written |= pages

    @invariant()
    def books_agree(self):
        """Free + held = usable, and each unfinished request is in one list."""
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        listed = scheduler.running + list(scheduler.waiting)
        assert len(set(listed)) == len(listed)
        assert {request.request_id for request in listed} == set(scheduler.requests)

    def teardown(self):
        """Without further arrivals everything ends, each request once, and all pages are free."""
        if self.engine is None:
            return
        self.engine.run(max_steps=5_000)
        for name, request in self.requests.items():
            outputs = self.engine.outputs[name]
            assert request.is_finished()
            assert self.engine.tokens(name) == list(request.output_token_ids)
            assert sum(o.finished for o in outputs) == (name not in self.aborted)
            assert not outputs or all(not o.finished for o in outputs[:-1])
            self.check_end(request)
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        assert not self.engine.model.tokens
        assert self.engine.model.finished == set(self.requests)

    def check_end(self, request):
        """It ended for a reason that is true."""
        params, output = request.sampling_params, request.output_token_ids
        reason = request.get_finished_reason()
        if reason is FinishReason.LENGTH:
            assert len(output) == params.max_tokens or request.num_tokens == MAX_MODEL_LEN
        elif reason is FinishReason.STOP:
            assert output[-1] in params.stop_token_ids
            assert not set(output[:-1]) & set(params.stop_token_ids)
        elif reason is FinishReason.ERROR:
            assert "of one request" in request.error_message


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=25)

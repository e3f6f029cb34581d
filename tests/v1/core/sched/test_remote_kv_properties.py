# SPDX-License-Identifier: Apache-2.0
"""However long transfers take, whichever fail, and whoever is aborted or preempted meanwhile: every
request ends, nobody reads what was not loaded or was freed, and all pages come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.v1.core.sched.transfers import Plan, ask, make_engine
from tests.v1.core.utils import NO_GOOD, Engine, cross_spec, full_spec, make_feature, window_spec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.remote_kv import LOSS_MESSAGE
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

PAGE = 4
MAX_MODEL_LEN = 96
GROUPS = {
    "full": (full_spec(PAGE),),
    "window": (window_spec(10, PAGE),),
    "hybrid": (full_spec(PAGE), window_spec(10, PAGE)),
    "unequal": (full_spec(PAGE), window_spec(17, 2 * PAGE), window_spec(6, 2 * PAGE)),
    "cross": (full_spec(PAGE), cross_spec(PAGE)),
}
PREFIXES = [[2 + i] * 30 for i in range(3)]

plans = st.builds(
    Plan,
    num_tokens=st.sampled_from([0, 0, 1, 5, 8, 17, 30, MAX_MODEL_LEN]),
    is_async=st.booleans(),
    num_refusals=st.sampled_from([0, 0, 1, 5]),
    num_steps=st.sampled_from([0, 1, 1, 3, 12]),
    failing_page=st.none() | st.integers(0, 20),
    keep_steps=st.none() | st.integers(0, 8),
)


class TransferMachine(RuleBasedStateMachine):
    """Requests whose beginnings come from elsewhere, and whose pages others read after their end."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None

    @initialize(
        pages=st.integers(6, 40),
        groups=st.sampled_from(sorted(GROUPS)),
        budget=st.sampled_from([8, 13, 32, MAX_MODEL_LEN]),
        max_num_seqs=st.integers(1, 6),
        caching=st.booleans(),
        chunked=st.booleans(),
        priorities=st.sampled_from(["fcfs", "priority"]),
        policy=st.sampled_from(["recompute", "fail"]),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def start(self, pages, groups, budget, max_num_seqs, caching, chunked, priorities, policy,
              watermark):  # fmt: skip
        self.budget = budget if chunked else MAX_MODEL_LEN
        self.max_num_seqs = max_num_seqs
        self.has_encoder = groups == "cross"
        self.policy = policy
        self.engine = make_engine(
            pages,
            *GROUPS[groups],
            policy_of_scheduling=priorities,
            policy=policy,
            seed=pages,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=self.budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            watermark=watermark,
        )
        self.engine.model.unencodable = {"input 3"}
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        plan=plans,
        prefix=st.integers(0, 2),
        num_shared=st.integers(0, 30),
        num_own=st.integers(1, 30),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        encoder_input=st.integers(0, 3),
        is_whole_prompt_wanted=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, plan, prefix, num_shared, num_own, max_tokens, priority, encoder_input,
               is_whole_prompt_wanted):  # fmt: skip
        name = f"r{len(self.requests)}"
        # Of three kinds only, so that prompts are found whole, too.
        own = [100 + len(self.requests) % 3] * num_own
        features = [make_feature(f"input {encoder_input}", 3 + 4 * encoder_input)]
        self.requests[name] = ask(
            self.engine,
            plan,
            name,
            PREFIXES[prefix][:num_shared] + own,
            max_tokens,
            hash_block_size=PAGE,
            priority=priority,
            arrival_time=0.0,
            mm_features=features if self.has_encoder else None,
            prompt_logprobs=0 if is_whole_prompt_wanted else None,
        )

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.step()

    @rule(num_steps=st.integers(1, 6))
    def more_steps(self, num_steps):
        """Twice as often as anything else happens: else nothing comes far."""
        self.steps(num_steps)

    def step(self):
        scheduler, model = self.engine.scheduler, self.engine.model
        before = {name: len(outputs) for name, outputs in self.engine.outputs.items()}
        step = self.engine.step()
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        assert step.total_num_scheduled_tokens <= self.budget
        assert len(scheduler.running) <= self.max_num_seqs
        for name in model.discarded:
            new = self.engine.outputs[name][before[name] :]
            assert not any(output.new_token_ids for output in new)
            assert self.requests[name].status is not RequestStatus.RUNNING

    @rule(data=st.data())
    def abort(self, data):
        names = sorted(self.engine.scheduler.requests)
        if names:
            name = data.draw(st.sampled_from(names))
            ended = self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.aborted |= {request.request_id for request in ended}

    @rule(state=st.sampled_from(PauseState))
    def pause_for_a_step(self, state):
        self.engine.scheduler.set_pause_state(state)
        self.step()
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule()
    def start_over(self):
        scheduler = self.engine.scheduler
        is_free = not scheduler.remote_kv.requests and not scheduler.remote_kv.has_work
        assert scheduler.reset_prefix_cache(reset_running_requests=True) == is_free

    @invariant()
    def books_agree(self):
        """Free + held = usable, and each unfinished request is in one list."""
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        listed = [*scheduler.running, *scheduler.waiting, *scheduler.deferred]
        listed += scheduler.remote_kv.requests
        assert len(set(listed)) == len(listed)
        assert {request.request_id for request in listed} == set(scheduler.requests)

    def teardown(self):
        """Without further arrivals everything ends, each request once, and all pages are free."""
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        for _ in range(5_000):
            if not scheduler.has_requests():
                break
            self.step()
        assert not scheduler.has_requests()
        for name, request in self.requests.items():
            assert request.is_finished()
            self.check_end(name, request)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        assert self.engine.model.num_transfers == 0
        assert self.engine.model.finished == set(self.requests)
        connector = scheduler.get_kv_connector()
        assert connector.arrived == list(self.requests)
        assert sorted(connector.finished) == sorted(self.requests)

    def check_end(self, name: str, request: Request) -> None:
        """It ended for a reason that is true, and its client was told."""
        outputs = self.engine.outputs[name]
        assert self.engine.tokens(name) == list(request.output_token_ids)
        assert sum(output.finished for output in outputs) == (name not in self.aborted)
        plan = self.engine.scheduler.get_kv_connector().plans[name]
        reason = request.get_finished_reason()
        if reason is FinishReason.LENGTH:
            is_at_end = request.num_tokens == MAX_MODEL_LEN
            assert is_at_end or request.num_output_tokens == request.max_tokens
            keeps = plan.keep_steps is not None
            assert (outputs[-1].kv_transfer_params is not None) == keeps
        elif request.error_message == NO_GOOD:
            assert request.mm_features[0].identifier in self.engine.model.unencodable
        elif reason is FinishReason.ERROR and request.is_engine_fault:
            assert request.error_message == LOSS_MESSAGE
            assert self.policy == "fail"


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = settings(max_examples=100, stateful_step_count=30)

# SPDX-License-Identifier: Apache-2.0
"""The scheduler: which requests compute how many tokens in each step.

Every request has a place in one fixed order (arrival, or priority), whether it waits or runs:

* Running requests go first, in that order. One that finds no page takes those of the last in the
  order, which starts over later. So the first one always gets on, and nobody takes turns in
  throwing the other out.
* Then waiting requests are admitted, in that order, if their prompt fits whole beside what running
  prompts still need. Small ones may go ahead of one that does not fit (`LookAhead`).
* A request that would not fit even if nobody else held a page never will: it ends with an error,
  and nobody makes way for it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderInputs
from vllm.v1.core.sched.feasibility import Feasibility
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.look_ahead import Admission, LookAhead
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.remote_kv import LOSS_MESSAGE, make_remote_kv
from vllm.v1.core.sched.request_queue import (
    DeferredRequests,
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
    get_order_key,
)
from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.core.sched.utils import address, last_output, next_output, remove_all
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput, RequestFailure
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

logger = init_logger(__name__)


class Scheduler(SchedulerInterface):
    """See the module. `requests` holds all unfinished ones; each is in `running`, in `waiting`, in
    `deferred` or with `remote_kv`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: None,
        block_size: int,
        hash_block_size: int | None = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        config = vllm_config.scheduler_config
        self.vllm_config = vllm_config
        self.scheduler_config = config
        self.max_num_running_reqs = config.max_num_seqs
        self.max_num_scheduled_tokens = config.max_num_batched_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.log_stats = log_stats
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            self.max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=block_size if hash_block_size is None else hash_block_size,
            max_in_flight_tokens=self.max_num_scheduled_tokens,
            enable_caching=vllm_config.cache_config.enable_prefix_caching,
            log_stats=log_stats,
            watermark=config.watermark,
        )
        self.encoder_inputs = EncoderInputs(vllm_config, kv_cache_config)
        self._feasibility = Feasibility(vllm_config, self.kv_cache_manager, self.encoder_inputs)

        policy = SchedulingPolicy(config.policy)
        self._order_key = get_order_key(policy)
        self.remote_kv = make_remote_kv(
            vllm_config, kv_cache_config, self.kv_cache_manager, self._order_key, log_stats
        )
        self.requests: dict[str, Request] = {}
        self.waiting: RequestQueue = create_request_queue(policy)
        self.deferred = DeferredRequests(policy)
        self.running: list[Request] = []
        self._pause_state = PauseState.UNPAUSED

        # For the runner, with the next step: what it must forget.
        self.finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        # For clients, with the next outputs.
        self._failed: list[Request] = []
        self._finished_by_client: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self._num_preempted_since_stats = 0
        self._check_integrity_when_idle = envs.VLLM_DEBUG_CHECK_INTEGRITY

    # --- A step ---

    def schedule(self) -> SchedulerOutput:
        plan = StepPlan(self.max_num_scheduled_tokens)
        if self._pause_state is not PauseState.PAUSED_ALL:
            self._schedule_running(plan)
        if self._pause_state is PauseState.UNPAUSED:
            self._schedule_loaded(plan)
            self._schedule_waiting(plan)
        return self._close(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_tokens = self._num_tokens_next(request, request.num_computed_tokens, plan)
            if num_tokens > 0 and not self._run_on(request, num_tokens, plan):
                continue  # It is no longer at `index`.
            index += 1

    def _run_on(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Gives a running request its next tokens, at the cost of those after it if need be. False
        if it had to make way itself."""
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_tokens)
            if new_blocks is not None:
                plan.add_known(request, num_tokens, new_blocks)
                return True
            if not self.kv_cache_manager.fits_alone(request, num_tokens):
                self.running.remove(request)
                self._fail(request, self._feasibility.too_large_for_the_pool(request))
                return False
            last = self.running[-1]
            self._preempt_last()
            if last is request:
                return False

    def _schedule_loaded(self, plan: StepPlan) -> None:
        """Starts requests that have got pages and content already."""
        for request in list(self.remote_kv.loaded):
            num_tokens = self._num_tokens_next(request, request.num_computed_tokens, plan)
            if num_tokens == 0 or len(self.running) >= self.max_num_running_reqs:
                break
            if self.kv_cache_manager.allocate_slots(request, num_tokens) is not None:
                self.remote_kv.taken(request)
                self._start(request, num_tokens, plan)
            elif not self.running:
                # Nobody else will give pages back for what it has besides.
                self.remote_kv.taken(request)
                self._start_over(request)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        if self._is_full(plan):
            return  # Those whose turn it were would be before others in the queue, and not asked.
        for request in self.deferred.take_turn():
            self.waiting.add_request(request)
        if not self.waiting:
            return
        look_ahead = LookAhead()
        num_promised_blocks = sum(
            self._num_blocks_promised_to(r, plan) for r in (*self.running, *self.remote_kv.requests)
        )
        taken: list[Request] = []
        for request in self.waiting:
            if self._is_full(plan) or look_ahead.is_closed:
                break
            admission = self._admit(request, plan, num_promised_blocks)
            if admission is Admission.NOT_YET:
                look_ahead.not_yet(request)
                continue
            if admission is Admission.ADMITTED:
                look_ahead.admitted()
                num_promised_blocks += self._num_blocks_promised_to(request, plan)
            elif (reason := self._feasibility.why_never(request)) is not None:
                self._fail(request, reason)  # It could once, but has grown.
            else:
                look_ahead.passed_over(request)
                continue
            taken.append(request)
        self.waiting.remove_requests(taken + look_ahead.deferred)
        for request in look_ahead.deferred:
            self.deferred.add_request(request)

    def _is_full(self, plan: StepPlan) -> bool:
        return (
            plan.token_budget == 0
            or len(self.running) >= self.max_num_running_reqs
            or self.kv_cache_manager.block_pool.get_num_free_blocks() == 0
        )

    def _num_blocks_promised_to(self, request: Request, plan: StepPlan) -> int:
        """Free pages that the rest of a prompt still takes after this step."""
        num_computed = request.num_computed_tokens + plan.num_tokens_of(request)
        if num_computed >= request.num_tokens:
            return 0
        return self.kv_cache_manager.num_blocks_to_complete(request)

    def _admit(self, request: Request, plan: StepPlan, num_promised_blocks: int) -> Admission:
        """Starts a waiting request, or the load of its keys and values, if there is room for all
        its tokens so far, and for its encoder inputs unless their keys and values are found."""
        manager, encoder = self.kv_cache_manager, self.encoder_inputs
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        remote = self.remote_kv.find(request, num_hit_tokens)
        if remote is None:
            return Admission.NOT_YET
        num_computed_tokens = num_hit_tokens + remote.num_computed
        if remote.is_async:
            num_tokens = remote.num_loaded - remote.num_computed
        else:
            num_tokens = self._num_tokens_next(request, num_computed_tokens, plan)
        num_encoder_tokens = encoder.num_tokens(request)
        all_hits = manager.with_encoder_blocks(request, num_encoder_tokens, hits)
        must_encode = all_hits is None and remote.num_loaded == 0
        if not (num_tokens or remote.is_async) or (
            must_encode and not encoder.has_room(request, plan)
        ):
            return Admission.NO_ROOM
        new_blocks = manager.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=all_hits or hits,
            num_external_computed_tokens=remote.num_computed,
            delay_cache_blocks=remote.is_async,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=True,
            reserved_blocks=num_promised_blocks,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return Admission.NO_ROOM
        manager.record_prefix_cache_stats(request, num_hit_tokens)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        self.remote_kv.allocated(request, remote)
        if not remote.is_async:
            self._start(request, num_tokens, plan)
        if must_encode:
            encoder.encode(request, plan)
        elif all_hits is not None:
            encoder.found(request)
        return Admission.ADMITTED

    def _start(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """Gives a request that has pages its seat, and its first tokens."""
        request.status = RequestStatus.RUNNING
        self._record(request, EngineCoreEventType.SCHEDULED)
        bisect.insort(self.running, request, key=self._order_key)
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        plan.add_new(request, num_tokens, block_ids)

    def _num_tokens_next(self, request: Request, num_computed_tokens: int, plan: StepPlan) -> int:
        """Tokens that the request computes in this step: all that are known but not computed, or
        as many as the step and the config allow. 0: nothing to do, or no room for a prompt that
        must not be split."""
        num_tokens = request.num_tokens - num_computed_tokens
        if not self.scheduler_config.enable_chunked_prefill:
            return num_tokens if num_tokens <= plan.token_budget else 0
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold > 0:
            num_tokens = min(num_tokens, threshold)
        return min(num_tokens, plan.token_budget)

    def _close(self, plan: StepPlan) -> SchedulerOutput:
        """Makes the plan the step, and counts its tokens as computed."""
        output = SchedulerOutput(
            scheduled_new_reqs=plan.new_requests,
            scheduled_cached_reqs=plan.known_requests,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=self.max_num_scheduled_tokens - plan.token_budget,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self._preempted_req_ids,
            # Zeros: no attention backend here computes a prefix common to all requests apart.
            num_common_prefix_blocks=[0] * self.num_kv_cache_groups,
            scheduled_encoder_inputs=plan.encoder_inputs,
            free_encoder_mm_hashes=self.encoder_inputs.end_step(),
            new_block_ids_to_zero=self.kv_cache_manager.take_new_block_ids() or None,
        )
        self.remote_kv.describe(output)
        self.finished_req_ids = set()
        self._preempted_req_ids = set()
        for request in plan.requests:
            request.num_computed_tokens += plan.num_tokens_of(request)
        return output

    # --- What the step gave ---

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # Before the news of loads: one that ends with this step may have found what failed.
        self._take_failures(scheduler_output, model_runner_output.failures)
        remote_output = model_runner_output.kv_connector_output
        for request in self.remote_kv.take_in(remote_output, self.running):
            self._lose(request)
        by_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        stopped: dict[Request, EngineCoreOutput] = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # It was ended from outside while the step ran, or lost its pages.
            output = next_output(request, model_runner_output, self.max_model_len)
            if output is None:
                continue
            by_client[request.client_index].append(output)
            if output.finished:
                stopped[request] = output
        self._remove(set(stopped))
        for request, output in stopped.items():
            output.kv_transfer_params = self._free(request)
        for request in self._failed:
            by_client[request.client_index].append(last_output(request))
        self._failed = []
        if self._check_integrity_when_idle and not self.requests:
            self.check_integrity()
        has_news = by_client or remote_output is not None or scheduler_output.finished_req_ids
        has_news = has_news or scheduler_output.num_scheduled_tokens
        finished = self._finished_by_client
        if finished is not None:
            self._finished_by_client = defaultdict(set)
        return address(by_client, finished or {}, self.make_stats() if has_news else None)

    def _take_failures(
        self, scheduler_output: SchedulerOutput, failures: dict[str, RequestFailure]
    ) -> None:
        """Ends requests that cannot go on. Of those that were not computed nothing is kept, also if
        they were ended from outside while the step ran."""
        for new in scheduler_output.scheduled_new_reqs if failures else ():
            if new.req_id in failures and not failures[new.req_id].is_computed:
                pages = {page for ids in new.block_ids for page in ids if page}
                self.kv_cache_manager.evict_blocks(pages)
                self.remote_kv.not_written(pages)
        for request_id, failure in failures.items():
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                self.running.remove(request)
                request.is_engine_fault = not failure.is_computed
                self._fail(request, failure.message)

    # --- Requests come and go ---

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests or self.remote_kv.holds(request.request_id):
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._record(request, EngineCoreEventType.QUEUED)
        self.requests[request.request_id] = request
        self.remote_kv.arrived(request)
        reason = self._feasibility.why_never(request)
        if reason is not None:
            self._fail(request, reason)
        else:
            self.waiting.add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if not RequestStatus.is_finished(finished_status):
            raise ValueError(f"{finished_status.name} is no end")
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        self._remove(set(ended))
        for request in ended:
            request.status = finished_status
            self._free(request)
        return ended

    def _preempt_last(self) -> None:
        """Takes all pages of the last running request; it starts over when its turn comes.

        Requests are given tokens in order and the last is the victim, so no victim has been given
        tokens in this step: the pages it made known to the prefix cache are all computed.
        """
        self._start_over(self.running.pop())

    def _start_over(self, request: Request) -> None:
        """Takes all pages of a request that is in no list, and lets it wait."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preempted_since_stats += 1
        self._preempted_req_ids.add(request.request_id)
        self._record(request, EngineCoreEventType.PREEMPTED)
        self.waiting.prepend_request(request)

    def _lose(self, request: Request) -> None:
        """Pages that the request needs could not be loaded."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        if self.remote_kv.recomputes:
            logger.warning("request %s: keys and values are computed anew", request.request_id)
            self._start_over(request)
        else:
            request.is_engine_fault = True
            self._fail(request, LOSS_MESSAGE)

    def _fail(self, request: Request, reason: str) -> None:
        """Ends a request that is in no list; its client is told why with the next outputs."""
        logger.warning("request %s: %s", request.request_id, reason)
        request.status = RequestStatus.FINISHED_ERROR
        request.error_message = reason
        self._free(request)
        self._failed.append(request)

    def _free(self, request: Request) -> dict[str, Any] | None:
        """Forgets a finished request that is in no list any more. Returns the `kv_transfer_params`
        of its output."""
        kv_transfer_params = self.remote_kv.end(request)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)
        if self._finished_by_client is not None:
            self._finished_by_client[request.client_index].add(request.request_id)
        return kv_transfer_params

    def _remove(self, requests: set[Request]) -> None:
        """Takes requests out of `running`, `waiting` and `deferred`."""
        if not requests:
            return
        in_running = requests.intersection(self.running)
        self.running = remove_all(self.running, in_running)
        for request in requests.difference(in_running, self.remote_kv.requests):
            queue = self.deferred if request in self.deferred else self.waiting
            queue.remove_request(request)

    def _record(self, request: Request, event: EngineCoreEventType) -> None:
        if self.log_stats:
            request.record_event(event)

    # --- What others ask ---

    def get_num_unfinished_requests(self) -> int:
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        if self._pause_state is PauseState.PAUSED_NEW:
            return len(self.running)
        return sum(self.get_request_counts())

    def has_finished_requests(self) -> bool:
        return bool(self.finished_req_ids) or self.remote_kv.has_work

    def get_request_counts(self) -> tuple[int, int]:
        num_waiting = len(self.waiting) + len(self.deferred) + len(self.remote_kv.requests)
        return len(self.running), num_waiting

    def get_kv_cache_usage(self) -> float:
        return self.kv_cache_manager.usage

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        done = self.remote_kv.reset() if reset_connector else True
        if reset_running_requests:
            while self.running:
                self._preempt_last()
        return self.kv_cache_manager.reset_prefix_cache() and done

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        return self.remote_kv.connector

    def make_stats(self) -> SchedulerStats | None:
        prefix_cache_stats = self.kv_cache_manager.make_prefix_cache_stats()
        if prefix_cache_stats is None:
            return None
        num_preempted, self._num_preempted_since_stats = self._num_preempted_since_stats, 0
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=self.get_request_counts()[1],
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=prefix_cache_stats,
            num_preempted_reqs=num_preempted,
            kv_connector_stats=self.remote_kv.take_stats(),
            encoder_stats=self.encoder_inputs.take_stats(),
        )

    def check_integrity(self) -> None:
        """Checks the books of the block pool.

        Raises:
            KVCacheIntegrityError: they contradict each other.
        """
        self.kv_cache_manager.check_integrity()

    def shutdown(self) -> None:
        self.remote_kv.shutdown()

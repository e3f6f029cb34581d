# SPDX-License-Identifier: Apache-2.0
"""A KV connector whose transfers take as many steps as a request says, and a stand-in model that
moves the content and checks that pages are left alone meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.v1.core.utils import Engine, FakeModel, make_request, make_scheduler
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

LOST = ("lost",)


@dataclass(frozen=True)
class Plan:
    """What the connector does for a request.

    num_tokens: of its beginning, that are stored elsewhere.
    num_refusals: times that it says "ask again later".
    num_steps: that an asynchronous load takes.
    failing_page: of those to be loaded, which is not; counted over all groups, modulo their number.
    keep_steps: steps for which a peer reads its pages after its end; None: nobody does.
    """

    num_tokens: int = 0
    is_async: bool = True
    num_refusals: int = 0
    num_steps: int = 1
    failing_page: int | None = None
    keep_steps: int | None = None


@dataclass
class Load:
    """Pages to fill: (group, place in the table, page)."""

    request: Request
    begin: int
    num_tokens: int
    plan: Plan
    pages: list[tuple[int, int, int]]
    steps_left: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.num_tokens

    @property
    def failing(self) -> tuple[int, int, int] | None:
        if self.plan.failing_page is None or not self.pages:
            return None
        return self.pages[self.plan.failing_page % len(self.pages)]


@dataclass
class Send:
    """Pages that a peer reads after the request's end, and what they hold."""

    request_id: str
    slots: dict[tuple[int, int], Any]
    steps_left: int


@dataclass
class TimedMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    sends: list[tuple[Request, tuple[list[int], ...], int]] = field(default_factory=list)


class TimedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half. Plans are found in `plans`, by request id."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.plans: dict[str, Plan] = {}
        self.finished: list[str] = []
        self.arrived: list[str] = []
        self.num_asked: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        self._metadata = TimedMetadata()

    def on_new_request(self, request: Request) -> None:
        self.arrived.append(request.request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        plan = self.plans.get(request.request_id, Plan())
        asked = self.num_asked[request.request_id] = (
            self.num_asked.get(request.request_id, 0) + 1
        )
        if asked <= plan.num_refusals:
            return None, False
        self._begins[request.request_id] = num_computed_tokens
        return max(0, plan.num_tokens - num_computed_tokens), plan.is_async

    def update_state_after_alloc(self, request, blocks, num_external_tokens) -> None:
        if num_external_tokens == 0:
            return
        plan, begin = self.plans[request.request_id], self._begins[request.request_id]
        end = begin + num_external_tokens
        pages = []
        for group_id, group in enumerate(blocks.blocks):
            spec = self._kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
            is_cross = isinstance(spec, CrossAttentionSpec)
            last = len(group) if is_cross else -(-end // spec.block_size)
            first = 0 if is_cross else begin // spec.block_size
            assert len(group) >= last, "a token that is to be loaded has no page"
            for place in range(first, last):
                # Pages with a hash have their content: found in the cache.
                known = is_cross and group[place].block_hash is not None
                if not group[place].is_null and not known:
                    pages.append((group_id, place, group[place].block_id))
        self._metadata.loads.append(
            Load(request, begin, num_external_tokens, plan, pages, plan.num_steps)
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TimedMetadata:
        metadata, self._metadata = self._metadata, TimedMetadata()
        return metadata

    def request_finished_all_groups(self, request, block_ids):
        self.finished.append(request.request_id)
        plan = self.plans.get(request.request_id, Plan())
        has_content = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if plan.keep_steps is None or not has_content:
            return False, None
        self._metadata.sends.append((request, block_ids, plan.keep_steps))
        return True, {"remote_block_ids": [list(ids) for ids in block_ids]}

    def start_load_kv(self, forward_context, **kwargs) -> None:
        raise AssertionError("the scheduler's half loads nothing")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class TransferModel(FakeModel):
    """Also the worker's half. `discarded`: requests of the last step that worked on content that
    was not loaded; what they gave must reach nobody."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        managers = scheduler.kv_cache_manager.single_type_managers
        super().__init__([manager.kv_cache_spec for manager in managers], seed)
        self._scheduler = scheduler
        self._loads: list[Load] = []
        self._sends: list[Send] = []
        self._may_read_lost = False
        self.discarded: set[str] = set()

    @property
    def num_transfers(self) -> int:
        return len(self._loads) + len(self._sends)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        metadata = step.kv_connector_metadata
        assert isinstance(metadata, TimedMetadata)
        self.discarded = set()
        report = KVConnectorOutput(set(), set())
        for load in metadata.loads:
            if load.plan.is_async:
                self._loads.append(load)
            else:
                self._fill(load, report)
        self._may_read_lost = bool(report.invalid_block_ids)
        self._check_pages_in_flight()
        output = super().run(step)
        self._go_on(metadata, report)
        if not report.is_empty():
            output.kv_connector_output = report
        return output

    def _go_on(self, metadata: TimedMetadata, report: KVConnectorOutput) -> None:
        for request, block_ids, steps in metadata.sends:
            self._sends.append(Send(request.request_id, self._content(request, block_ids), steps))
        for load in list(self._loads):
            load.steps_left -= 1
            if load.steps_left < 0:
                self._loads.remove(load)
                self._fill(load, report)
                report.finished_recving.add(load.request.request_id)
        for send in list(self._sends):
            send.steps_left -= 1
            for slot, content in send.slots.items():
                assert self._slots[slot] == content, f"{send.request_id}: a page was not kept"
            if send.steps_left < 0:
                self._sends.remove(send)
                report.finished_sending.add(send.request_id)

    def _content(self, request: Request, block_ids: tuple[list[int], ...]) -> dict:
        """What the pages of a request that has ended hold, checked."""
        names = self._name_prefixes(list(request.all_token_ids)[: request.num_computed_tokens])
        content = {}
        for group_id, ids in enumerate(block_ids):
            size = self._specs[group_id].block_size
            wanted = names
            if group_id in self._cross_groups:
                wanted = [(f.identifier, i) for f in request.mm_features
                          for i in range(f.mm_position.length)]  # fmt: skip
            for position, name in enumerate(wanted):
                page_id = ids[position // size]
                if page_id:
                    slot = (page_id, position % size)
                    assert self._slots[slot] == (group_id, name), "a page was given away too early"
                    content[slot] = (group_id, name)
        return content

    def _check_pages_in_flight(self) -> None:
        """Nobody else has a page that is being written to, even if its request was aborted."""
        managers = self._scheduler.kv_cache_manager.single_type_managers
        for load in self._loads:
            for group_id, place, page_id in load.pages:
                table = managers[group_id].req_to_blocks[load.request.request_id]
                assert table[place].block_id == page_id
                assert table[place].ref_cnt == 1

    def _fill(self, load: Load, report: KVConnectorOutput) -> None:
        names = self._name_prefixes(list(load.request.all_token_ids)[: load.end])
        failing = load.failing
        if failing is not None:
            report.invalid_block_ids.add(failing[2])
        for group_id, place, page_id in load.pages:
            size = self._specs[group_id].block_size
            wanted = names
            if group_id in self._cross_groups:
                wanted = [(f.identifier, i) for f in load.request.mm_features
                          for i in range(f.mm_position.length)]  # fmt: skip
            begin = place * size
            for position in range(begin, min(begin + size, len(wanted))):
                lost = (group_id, place, page_id) == failing
                content = LOST if lost else (group_id, wanted[position])
                self._slots[page_id, position - begin] = content

    def _read(self, request_id: str, names: list[int], begin: int) -> None:
        """Whoever reads what was not loaded makes more of the kind, for others to read."""
        try:
            super()._read(request_id, names, begin)
        except AssertionError:
            if not (self._may_read_lost and self._reads_lost(request_id, len(names))):
                raise
            self.discarded.add(request_id)
            for group_id in set(range(len(self._specs))) - set(self._cross_groups):
                for position in range(begin, len(names)):
                    self._slots[self._slot(request_id, group_id, position)] = LOST

    def _reads_lost(self, request_id: str, num_tokens: int) -> bool:
        return any(
            self._slots.get((page_id, offset)) == LOST
            for group_id, ids in enumerate(self.block_ids[request_id])
            for page_id in ids
            for offset in range(self._specs[group_id].block_size)
            if page_id
        )


def make_engine(
    usable_pages: int,
    *specs,
    policy: str = "recompute",
    policy_of_scheduling: str = "fcfs",
    seed: int = 0,
    **config,
) -> Engine:
    """An engine over that many pages with a `TimedConnector`."""
    transfer = KVTransferConfig(
        kv_connector="TimedConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
    )
    scheduler = make_scheduler(
        usable_pages,
        *specs,
        log_stats=True,
        kv_transfer_config=transfer,
        policy=policy_of_scheduling,
        **config,
    )
    return Engine(scheduler, model=TransferModel(scheduler, seed))


def ask(engine: Engine, plan: Plan, *args, **kwargs) -> Request:
    """Queues a request for which the connector has that plan."""
    request = make_request(*args, **kwargs)
    engine.scheduler.get_kv_connector().plans[request.request_id] = plan
    engine.add(request)
    return request

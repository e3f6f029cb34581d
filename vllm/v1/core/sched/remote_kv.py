# SPDX-License-Identifier: Apache-2.0
"""Requests whose keys and values come from elsewhere, or are read from elsewhere after their end.

The scheduler's lists and these, for a connector that loads asynchronously:

    waiting --allocated--> loading --finished_recving--> loaded --a seat is free--> running
       ^                      | pages missing, policy recompute                        |
       +----------------------+-----------------------------------------------------<--+ preempted

    running, loading, ... --end--> held (pages kept)  --finished_sending, finished_recving--> free

Requests in `loading` and `loaded` hold pages and have no turn: nobody waits behind them, and no
page of theirs can be taken. That ends by itself: a load ends, well or not, and a loaded request
gets a seat, or gives its pages back if it alone could go on and finds too few.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import OrderKey
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

logger = init_logger(__name__)

LOSS_MESSAGE = (
    "keys and values of the prompt could not be loaded from where they were computed: ask again, "
    "or start the server with kv_load_failure_policy recompute"
)
_SENDING, _RECEIVING = "sending", "receiving"


class RemoteTokens(NamedTuple):
    """Tokens after those in the prefix cache.

    num_loaded: those whose keys and values are loaded.
    num_computed: of these, those that count as computed: not the request's last token, which is
        computed here for its logits, into the page that was loaded.
    """

    num_loaded: int = 0
    num_computed: int = 0
    is_async: bool = False


class NoRemoteKV:
    """There is no connector: what is not in the prefix cache is computed, and pages are free when
    their request has ended."""

    connector: KVConnectorBase_V1 | None = None
    recomputes = True
    has_work = False
    """Whether steps are needed though no request runs."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.loading: dict[str, Request] = {}
        self.loaded: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """Those that hold pages and neither wait nor run."""
        return [*self.loading.values(), *self.loaded]

    def holds(self, request_id: str) -> bool:
        """Whether pages of a request of that name, which has ended, are kept."""
        return False

    def arrived(self, request: Request) -> None:
        """A request is new."""

    def find(self, request: Request, num_hit_tokens: int) -> RemoteTokens | None:
        """What can be loaded after the first `num_hit_tokens` tokens; None: ask again later."""
        return RemoteTokens()

    def allocated(self, request: Request, remote: RemoteTokens) -> None:
        """The request, which waited, has pages. If they are loaded asynchronously it is `loading`
        now."""

    def taken(self, request: Request) -> None:
        """A loaded request has a seat, or has given its pages back."""

    def describe(self, step: SchedulerOutput) -> None:
        """Adds what the connector's other half must know."""

    def take_in(
        self, output: KVConnectorOutput | None, running: Sequence[Request]
    ) -> list[Request]:
        """What the connector's other half reports. Returns the requests that depend on pages that
        could not be loaded: they are to start over, or to fail."""
        return []

    def not_written(self, pages: set[int]) -> None:
        """A step did not write what it was to write into these pages: requests that have found them
        and are loading will have to start over, or to fail."""

    def end(self, request: Request) -> dict[str, Any] | None:
        """A request has ended: frees its pages, now or when nobody needs them any more. Returns the
        `kv_transfer_params` of its output."""
        self.kv_cache_manager.free(request)
        return None

    def take_stats(self) -> dict[str, Any] | None:
        """What the connector has counted since this was last called."""
        return None

    def reset(self) -> bool:
        """Forgets what the connector stores; whether that was possible."""
        logger.warning("reset_connector has no effect: there is no KV connector")
        return True

    def shutdown(self) -> None:
        """The engine is going down."""


class RemoteKV(NoRemoteKV):
    """There is a connector; this talks to its scheduler's half.

    Args:
        order_key: the order in which loaded requests get a seat.
        max_requests: that hold pages without a seat; more wait.
        recomputes: requests whose pages cannot be loaded start over, rather than fail.
        log_stats: keep what the connector counts for `take_stats`.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv_cache_manager: KVCacheManager,
        order_key: OrderKey,
        max_requests: int,
        recomputes: bool,
        log_stats: bool,
    ) -> None:
        super().__init__(kv_cache_manager)
        self.connector: KVConnectorBase_V1 = connector
        self.recomputes = recomputes
        self._order_key = order_key
        self._max_requests = max_requests
        self._log_stats = log_stats
        self._stats: KVConnectorStats | None = None
        self._held: dict[str, tuple[Request, set[str]]] = {}
        # Of requests whose load fails: tokens before the first page that is missing.
        self._num_good_tokens: dict[str, int] = {}
        # What was missing once will be missing again: these are computed here.
        self._without_remote: set[str] = set()
        connector.bind_gpu_block_pool(kv_cache_manager.block_pool)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self.loading or self._held) or self.connector.has_pending_push_work()

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    # --- A request comes ---

    def arrived(self, request: Request) -> None:
        self.connector.on_new_request(request)

    def find(self, request: Request, num_hit_tokens: int) -> RemoteTokens | None:
        must_compute = request.get_skip_reading_prefix_cache()
        if must_compute or request.request_id in self._without_remote:
            return RemoteTokens()
        found, is_async = self.connector.get_num_new_matched_tokens(request, num_hit_tokens)
        if found is None:
            return None
        num_left = request.num_tokens - num_hit_tokens
        num_loaded = min(found, num_left)
        num_computed = min(found, num_left - 1)
        if not is_async:
            num_loaded = num_computed
        if num_loaded <= 0:
            return RemoteTokens()
        if is_async and len(self.loading) + len(self.loaded) >= self._max_requests:
            return None
        return RemoteTokens(num_loaded, num_computed, is_async)

    def allocated(self, request: Request, remote: RemoteTokens) -> None:
        blocks = self.kv_cache_manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, remote.num_loaded)
        if remote.is_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading[request.request_id] = request
        elif remote.num_loaded and request.has_encoder_inputs:
            self.kv_cache_manager.cache_encoder_blocks(request)

    def taken(self, request: Request) -> None:
        self.loaded.remove(request)

    def describe(self, step: SchedulerOutput) -> None:
        step.kv_connector_metadata = self.connector.build_connector_meta(step)

    # --- What the worker's half reports ---

    def take_in(
        self, output: KVConnectorOutput | None, running: Sequence[Request]
    ) -> list[Request]:
        if output is None:
            return []
        self.connector.update_connector_output(output)
        if self._log_stats:
            self._count(output.kv_connector_stats)
        lost = self._lose(output.invalid_block_ids, running) if output.invalid_block_ids else []
        for request_id in sorted(output.finished_recving or ()):
            lost += self._end_load(request_id)
        for request_id in sorted(output.finished_sending or ()):
            self._release(request_id, _SENDING)
        return lost

    def _lose(self, bad_pages: set[int], running: Sequence[Request]) -> list[Request]:
        """Forgets the content of these pages and of all that was computed from them. Returns the
        running requests that hold such pages; of those that are loading it is noted. Loaded ones
        hold none: what they found in the cache was there before this step's loads."""
        bad_pages = set(bad_pages)
        lost: list[Request] = []
        while True:
            found = [r for r in running if r not in lost and self._num_good(r, bad_pages) >= 0]
            if not found:
                break
            for request in found:
                bad_pages |= self._pages_after(request, self._num_good(request, bad_pages))
            lost += found
        self.kv_cache_manager.evict_blocks(bad_pages)
        self.not_written(bad_pages)
        self._without_remote |= {request.request_id for request in lost}
        return lost

    def not_written(self, pages: set[int]) -> None:
        for request in self.loading.values():
            num_good = self._num_good(request, pages)
            if num_good >= 0:
                before = self._num_good_tokens.get(request.request_id, num_good)
                self._num_good_tokens[request.request_id] = min(before, num_good)

    def _num_good(self, request: Request, bad_pages: set[int]) -> int:
        """Tokens before the first that depends on one of these pages; -1: none does."""
        num_good = -1
        for manager in self.kv_cache_manager.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            first = next((i for i, b in enumerate(blocks) if b.block_id in bad_pages), None)
            if first is None:
                continue
            is_cross = isinstance(manager.kv_cache_spec, CrossAttentionSpec)
            num_tokens = 0 if is_cross else first * manager.block_size
            num_good = num_tokens if num_good < 0 else min(num_good, num_tokens)
        return num_good

    def _pages_after(self, request: Request, num_good: int) -> set[int]:
        """The pages of tokens after the first `num_good`. Not those of encoder output: no token
        went into them."""
        pages: set[int] = set()
        for manager in self.kv_cache_manager.single_type_managers:
            if isinstance(manager.kv_cache_spec, CrossAttentionSpec):
                continue
            blocks = manager.req_to_blocks.get(request.request_id, ())
            later = blocks[num_good // manager.block_size :]
            pages |= {block.block_id for block in later if not block.is_null}
        return pages

    def _end_load(self, request_id: str) -> list[Request]:
        """Returns the request if pages are missing."""
        request = self.loading.pop(request_id, None)
        if request is None:
            self._release(request_id, _RECEIVING)
            return []
        num_good = self._num_good_tokens.pop(request_id, None)
        if num_good is None:
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            request.status = RequestStatus.WAITING
            bisect.insort(self.loaded, request, key=self._order_key)
            return []
        if num_good > 0:
            # What did arrive is found again when it starts over.
            self.kv_cache_manager.cache_blocks(request, num_good)
        self._without_remote.add(request_id)
        return [request]

    # --- A request ends ---

    def end(self, request: Request) -> dict[str, Any] | None:
        request_id = request.request_id
        keeps, params = self._tell_finished(request)
        reasons = {_SENDING} if keeps else set()
        if self.loading.pop(request_id, None) is not None:
            reasons.add(_RECEIVING)  # The pages are being written to.
        if request in self.loaded:
            self.loaded.remove(request)
        self._without_remote.discard(request_id)
        self._num_good_tokens.pop(request_id, None)
        if reasons:
            self._held[request_id] = (request, reasons)
        else:
            self.kv_cache_manager.free(request)
        return params

    def _tell_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        if isinstance(self.connector, SupportsHMA):
            return self.connector.request_finished_all_groups(request, block_ids)
        return self.connector.request_finished(request, block_ids[0])

    def _release(self, request_id: str, reason: str) -> None:
        request, reasons = self._held.get(request_id, (None, set()))
        if request is None:
            logger.debug("nothing is kept of request %s (%s)", request_id, reason)
            return
        reasons.discard(reason)
        if not reasons:
            del self._held[request_id]
            self.kv_cache_manager.free(request)

    # --- The rest ---

    def _count(self, stats: KVConnectorStats | None) -> None:
        for more in (stats, self.connector.get_kv_connector_stats()):
            if more is not None and not more.is_empty():
                self._stats = more if self._stats is None else self._stats.aggregate(more)

    def take_stats(self) -> dict[str, Any] | None:
        stats, self._stats = self._stats, None
        return None if stats is None else stats.data

    def reset(self) -> bool:
        done = self.connector.reset_cache()
        if done is None:
            logger.warning("reset_connector has no effect: the KV connector stores nothing")
        return done is not False

    def shutdown(self) -> None:
        self.connector.shutdown()


def make_remote_kv(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_cache_manager: KVCacheManager,
    order_key: OrderKey,
    log_stats: bool,
) -> NoRemoteKV:
    """The scheduler's side of what `kv_transfer_config` asks for.

    Raises:
        ValueError: there is no such connector, or it cannot serve the model.
    """
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return NoRemoteKV(kv_cache_manager)
    return RemoteKV(
        KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
        ),
        kv_cache_manager,
        order_key,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        recomputes=config.kv_load_failure_policy == "recompute",
        log_stats=log_stats,
    )

# SPDX-License-Identifier: Apache-2.0
"""What the engine core asks of a scheduler."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus


class PauseState(enum.IntEnum):
    """PAUSED_NEW: what runs goes on, nothing is admitted. PAUSED_ALL: nothing is computed."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class SchedulerInterface(ABC):
    """Decides what each step computes. `schedule` and `update_from_output` take turns."""

    @abstractmethod
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
        """A scheduler over the pages of `kv_cache_config`.

        Args:
            structured_output_manager: None; structured output is refused before it gets here.
            block_size: tokens; prefix hits are multiples of it (`resolve_kv_cache_block_sizes`).
            hash_block_size: tokens behind each block hash; None: `block_size`.
            include_finished_set: tell each client which of its requests ended.
            log_stats: keep events and statistics.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decides the next step. It may be empty."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes in what the step gave; returns what each client (by index) is to be told. Called
        for every step, empty ones too: requests that failed are told of here."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            ValueError: its id is in use.
        """

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Ends requests from outside: a client went away, or found a stop string.

        Args:
            request_ids: one, several, or None for all. Unknown ones are passed over: they may have
                ended by themselves a moment ago.

        Returns:
            Those that this has ended.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests that still have something to compute and may do so."""

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to compute."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether requests have ended that runner or clients have not been told of, or a connector
        still has something to do for them."""

    def has_requests(self) -> bool:
        """Whether a step is due."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @property
    @abstractmethod
    def pause_state(self) -> PauseState:
        """Whether it is paused."""

    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses or goes on."""

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets the content of all pages. Whether that was possible: not while requests run,
        unless `reset_running_requests` lets them start over."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""

    def get_kv_cache_usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return 0.0

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """Statistics since this was last called; None if they are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """The engine is going down."""

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler's half of the KV connector; None if there is none."""
        return None

# SPDX-License-Identifier: Apache-2.0
"""What a KV connector is. It has two halves, objects of one class that know their role:

* The scheduler's half decides which tokens of a request come from elsewhere and which pages they
  go to, and tells the worker's half with each step (`KVConnectorMetadata`).
* The worker's half moves the bytes, and reports what has arrived or left (`KVConnectorOutput`).

A request's way through the scheduler's half:

    on_new_request
    get_num_new_matched_tokens -> (n, is_async)     each time it may be admitted
    update_state_after_alloc(pages, n)              once it has pages
      is_async: it waits, without a turn, until the worker's half says finished_recving
    build_connector_meta                            each step
    request_finished -> (keep_pages, params)        once, when it ended or was aborted
      keep_pages: its pages are freed when the worker's half says finished_sending

A step in the worker's half, whether or not it has tokens:

    handle_preemptions, bind_connector_metadata, start_load_kv, handle_failed_requests
      forward: wait_for_layer_load(layer), attention, save_kv_layer(layer)
    wait_for_save, get_finished, get_block_ids_with_load_errors, clear_connector_metadata

This module imports no torch, as the scheduler's half runs without it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SupportsHMA(ABC):
    """A connector that moves the pages of several KV cache groups (hybrid memory allocation)."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with a list of page ids for each group. Page 0 stands where a
        group needs no page (any more)."""


def supports_hma(connector: Any) -> bool:
    """Whether a connector, or a class of connectors, moves the pages of several groups."""
    connector_cls = connector if isinstance(connector, type) else type(connector)
    return issubclass(connector_cls, SupportsHMA)


class KVConnectorRole(enum.Enum):
    """Which half a connector object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024
    """What a worker's half tells peers about itself; handed to the scheduler's half at start."""


class KVConnectorMetadata(ABC):  # noqa: B024
    """What the scheduler's half tells the worker's half with a step."""


class KVConnectorWorkerMetadata(ABC):
    """What the worker's half tells the scheduler's half after a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This and another worker's as one."""


class KVConnectorBase_V1(ABC):  # noqa: N801
    """A connector. See the module for who calls what, and when."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        if self._kv_transfer_config is None:
            raise ValueError("a KV connector needs kv_transfer_config")
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """Which half this is."""
        return self._role

    @property
    def uses_layer_hooks(self) -> bool:
        """Whether `wait_for_layer_load` and `save_kv_layer` have something to do. False spares each
        layer two calls."""
        return True

    # --- The worker's half ---

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The metadata of the step that begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The metadata of the step that is under way.

        Raises:
            RuntimeError: none is.
        """
        if self._connector_metadata is None:
            raise RuntimeError("no step is under way, so there is no connector metadata")
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once: the caches by layer, as the layers see them (aligned views of the
        allocations; layers may share one)."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The step's metadata, if requests were preempted: their pages still hold what they did, and
        when this returns they are zeroed, copied over and written to by others."""

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Starts whatever the step's metadata asks for. Pages that are loaded synchronously must be
        there when `wait_for_layer_load` returns. In a step without tokens `forward_context` has no
        attention metadata."""

    def handle_failed_requests(self, req_ids: set[str]) -> None:
        """After `start_load_kv`: these requests fail with the step that begins, which computes
        nothing of them; what its metadata say of saving their tokens is void."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention: waits until its pages are loaded."""

    @abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """After a layer's attention: its cache holds the step's keys and values."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the forward pass: waits until pages that were saved may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What has come to its end since this was last called.

        Args:
            finished_req_ids: requests that ended since the last step.

        Returns:
            ids of requests whose pages nobody reads any more (each that `request_finished` said to
            keep, once), and of those whose asynchronous load is over, well or not.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of this engine that were to be loaded and were not. For asynchronous loads told no
        later than the request is among the finished."""
        return set()

    def shutdown(self) -> None:
        """Stops threads and gives memory back. May be called twice."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since this was last called."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What peers must know of this worker, once the caches are registered."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's half is told after the step."""
        return None

    # --- The scheduler's half ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The pool that pages come from."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens after the first `num_computed_tokens` can be loaded. Called each time the
        request might be admitted; must change nothing.

        Returns:
            The tokens, None for "ask again later", which holds nobody else up (each step asks some
            of those requests again, so that it can take a few); and whether they are loaded
            asynchronously, between steps.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request was given pages, `num_external_tokens` of which are to be loaded (0: none).

        Args:
            blocks: all its pages, those found in the prefix cache first.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker's half must know for this step. Called once a step; may forget what it
        has told."""

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the worker's half reported after a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, was aborted, or failed. Called once for each, also if it never ran.

        Args:
            block_ids: its pages, of the only group.

        Returns:
            Whether its pages must be kept until `get_finished` names it as sent; and the
            `kv_transfer_params` of its output.
        """
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed though no request runs, besides those that loads and kept pages
        ask for anyway."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """NHD or HND, if the connector works with one only."""
        return None

    def get_finished_count(self) -> int | None:
        """Workers that must report a request before it counts as finished; None: all."""
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats with that `data`; None if the connector counts nothing."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """What each worker (by tensor-parallel rank) says of itself; called once, at start."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As `set_xfer_handshake_metadata`, by (pipeline rank, tensor-parallel rank); this is what
        the engine calls.

        Raises:
            ValueError: there are several pipeline ranks, and the connector knows none.
        """
        if any(pp_rank for pp_rank, _ in metadata):
            raise ValueError(f"{type(self).__name__} does not work with pipeline parallelism")
        self.set_xfer_handshake_metadata({tp: meta for (_, tp), meta in metadata.items()})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The connector's Prometheus metrics; None if it has none. Called in the API server's
        process, which has not imported torch."""
        return None

    def reset_cache(self) -> bool | None:
        """Forgets what is stored; whether that was possible. None: nothing is stored."""
        return None

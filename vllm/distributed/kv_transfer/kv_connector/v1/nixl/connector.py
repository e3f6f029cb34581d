# SPDX-License-Identifier: Apache-2.0
"""`NixlConnector`: prefill on one engine, decode on another, which reads the pages it needs.

    client -> proxy -> prefill server   max_tokens 1, kv_transfer_params {do_remote_decode}
                       response: kv_transfer_params {do_remote_prefill, engine, host, port, pages}
              proxy -> decode server    the same request with those
                       reads the pages, generates

Pages of prefill are kept until decode has read them, or its lease ends (`leases`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlBaseConnectorWorker
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class NixlPullConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; each object has one of `connector_scheduler` and `connector_worker`.

    Raises:
        ValueError: the config asks for something else than is supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_config(vllm_config)
        self.engine_id: str = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler: NixlConnectorScheduler | None = None
        self.connector_worker: NixlBaseConnectorWorker | None = None
        arguments = vllm_config, self.engine_id, kv_cache_config
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlConnectorScheduler(*arguments)
        else:
            # The scheduler's half runs without torch.
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import (
                NixlBaseConnectorWorker,
            )

            self.connector_worker = NixlBaseConnectorWorker(*arguments)

    @property
    def uses_layer_hooks(self) -> bool:
        return False

    # --- The scheduler's half ---

    def on_new_request(self, request: Request) -> None:
        self.connector_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.connector_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.connector_scheduler.build_connector_meta()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.connector_scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.connector_scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.connector_scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.connector_scheduler.has_pending_push_work()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.connector_scheduler.set_xfer_handshake_metadata(metadata)

    # --- The worker's half ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.connector_worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.connector_worker.get_handshake_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, NixlConnectorMetadata)
        self.connector_worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests whose pages are being read have no turn."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: peers read the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self.connector_worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.connector_worker.get_block_ids_with_load_errors()

    # --- Both ---

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_worker is None:
            return None
        return self.connector_worker.get_kv_connector_stats()

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return NixlKVConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return NixlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_config(vllm_config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    device, asked = current_platform.device_type, vllm_config.kv_transfer_config.kv_buffer_device
    if asked != device:
        raise ValueError(
            f"kv_buffer_device {asked!r} is not supported with NixlConnector on {device}: pages are "
            f"read from the cache itself; leave it out"
        )


NixlConnector = NixlPullConnector

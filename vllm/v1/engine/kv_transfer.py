# SPDX-License-Identifier: Apache-2.0
"""What an engine does at start for the sake of its KV connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.executor import Executor

logger = init_logger(__name__)


def adapt_to_connector(vllm_config: VllmConfig) -> None:
    """Before the model is made: layers with a sliding window keep all their pages if the connector
    moves those of one KV cache group only.

    Raises:
        ValueError: there is no such connector.
    """
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return
    scheduler_config = vllm_config.scheduler_config
    if not KVConnectorFactory.supports_hma_config(config):
        if not scheduler_config.disable_hybrid_kv_cache_manager:
            logger.info(
                "%s moves the pages of one KV cache group: layers with a sliding window get pages "
                "for the whole request, as full attention has", config.kv_connector,
            )  # fmt: skip
        scheduler_config.disable_hybrid_kv_cache_manager = True


def introduce_workers(scheduler: SchedulerInterface, executor: Executor) -> None:
    """Tells the scheduler's half of the connector what the workers' halves say of themselves."""
    connector = scheduler.get_kv_connector()
    if connector is None:
        return
    metadata = {}
    for of_worker in executor.get_kv_connector_handshake_metadata():
        metadata.update(of_worker or {})
    if metadata:
        connector.set_xfer_handshake_metadata_pp_aware(metadata)

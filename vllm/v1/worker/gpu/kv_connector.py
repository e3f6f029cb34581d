# SPDX-License-Identifier: Apache-2.0
"""The runner's side of a KV connector: its worker's half, called at the right moments of a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends.utils import is_valid_kv_cache_layout, set_kv_cache_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


class NoKVConnector:
    """There is no connector."""

    @property
    def uses_layer_hooks(self) -> bool:
        """Whether it works inside the forward pass, layer by layer."""
        return False

    def handle_preemptions(self, step: SchedulerOutput) -> None:
        """Before the step writes to any page."""

    def begin(self, step: SchedulerOutput) -> None:
        """Before the forward pass, inside its forward context."""

    def begin_alone(self, step: SchedulerOutput) -> None:
        """Before a forward pass that has no context."""

    def discard(self, req_ids: Collection[str]) -> None:
        """The next step that begins computes nothing of these requests, whatever it says."""

    def end(self, step: SchedulerOutput) -> KVConnectorOutput | None:
        """After the forward pass: what the scheduler's half must know."""
        return None

    def run_without_tokens(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """The whole of a step in which the model does not run."""
        return ModelRunnerOutput.with_kv_conn_output_only(None)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What peers must know of this worker."""
        return None

    def shutdown(self) -> None:
        """Stops the connector."""


class WorkerKVConnector(NoKVConnector):
    """There is one. Steps without connector metadata (those that warm up) do not concern it."""

    def __init__(self, connector: KVConnectorBase_V1, vllm_config: VllmConfig) -> None:
        self.connector = connector
        self._vllm_config = vllm_config
        self._discarded: set[str] = set()

    @property
    def uses_layer_hooks(self) -> bool:
        return self.connector.uses_layer_hooks

    def handle_preemptions(self, step: SchedulerOutput) -> None:
        if step.preempted_req_ids and step.kv_connector_metadata is not None:
            self.connector.handle_preemptions(step.kv_connector_metadata)

    def begin(self, step: SchedulerOutput) -> None:
        metadata = step.kv_connector_metadata
        if metadata is None:
            return
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(get_forward_context())
        if self._discarded:
            self.connector.handle_failed_requests(self._discarded)
            self._discarded = set()

    def begin_alone(self, step: SchedulerOutput) -> None:
        with set_forward_context(None, self._vllm_config, step.total_num_scheduled_tokens):
            self.begin(step)

    def discard(self, req_ids: Collection[str]) -> None:
        self._discarded = set(req_ids)

    def end(self, step: SchedulerOutput) -> KVConnectorOutput | None:
        connector = self.connector
        if step.kv_connector_metadata is None:
            return None
        connector.wait_for_save()
        sent, received = connector.get_finished(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            # After `get_finished`: errors of the loads that it named are among these.
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return None if output.is_empty() else output

    def run_without_tokens(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.begin_alone(step)
        return ModelRunnerOutput.with_kv_conn_output_only(self.end(step))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.connector.get_handshake_metadata()

    def shutdown(self) -> None:
        self.connector.shutdown()


def apply_required_layout(vllm_config: VllmConfig) -> None:
    """Before caches are made: the block layout that the connector works with, if it needs one.

    Raises:
        ValueError: VLLM_KV_CACHE_LAYOUT asks for another.
    """
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return
    connector_cls = KVConnectorFactory.get_connector_class(config)
    layout = connector_cls.get_required_kvcache_layout(vllm_config)
    if layout is None:
        return
    asked = envs.VLLM_KV_CACHE_LAYOUT
    if not is_valid_kv_cache_layout(layout) or asked not in (None, layout):
        raise ValueError(
            f"{connector_cls.__name__} works with the KV cache layout {layout}, but "
            f"VLLM_KV_CACHE_LAYOUT is {asked}: unset it (supported: NHD, HND)"
        )
    set_kv_cache_layout(layout)


def make_kv_connector(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> NoKVConnector:
    """The worker's side of what `kv_transfer_config` asks for, with the caches registered.

    Raises:
        ValueError: there is no such connector, or it cannot serve these caches.
    """
    config = vllm_config.kv_transfer_config
    if config is None or not config.is_kv_transfer_instance:
        return NoKVConnector()
    connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config
    )
    connector.register_kv_caches(kv_caches)
    if connector.uses_layer_hooks:
        layers = vllm_config.compilation_config.static_forward_context
        for name in kv_caches:
            _hook_layer(connector, name, layers[name])
    return WorkerKVConnector(connector, vllm_config)


def _hook_layer(connector: KVConnectorBase_V1, name: str, layer: nn.Module) -> None:
    """Lets the connector wait before, and save after, each call of an attention layer."""

    def before(module: nn.Module, args: Any) -> None:
        if connector.has_connector_metadata():
            connector.wait_for_layer_load(name)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if connector.has_connector_metadata():
            metadata = get_forward_context().attn_metadata
            connector.save_kv_layer(name, layer.kv_cache, metadata[name])

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which requests are read from where, and whose pages are kept. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    HeartbeatInfo,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    PeerKey,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.options import NixlOptions
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class NixlConnectorScheduler:
    """See `NixlConnector` for who calls what."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        config = vllm_config.kv_transfer_config
        self.engine_id = engine_id
        self.options = NixlOptions.from_config(config)
        self._is_producer, self._is_consumer = config.is_kv_producer, config.is_kv_consumer
        self._is_cross = [
            isinstance(group.kv_cache_spec, CrossAttentionSpec)
            for group in kv_cache_config.kv_cache_groups
        ]
        self._port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT
        # Requests whose pages a peer keeps and that have not been given pages here.
        self._to_load: dict[str, RemoteMeta] = {}
        # Requests that a peer keeps pages for, until they are read.
        self._awaited: dict[str, RemoteMeta] = {}
        # Those of them that peers have not been told of yet.
        self._new: set[str] = set()
        self._next = NixlConnectorMetadata()
        self._last_heartbeat = 0.0

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, NixlHandshakePayload]) -> None:
        """Learns the port that peers are to be told."""
        self._port = metadata[0].side_channel_port

    # --- A request is read from a peer ---

    def on_new_request(self, request: Request) -> None:
        """Notes what the request says of a peer. What makes no sense is said in the log, and the
        request's prompt computed here."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        try:
            if not self._is_consumer:
                raise ValueError("this engine's kv_role is kv_producer, so it loads nothing")
            remote = RemoteMeta.from_params(params)
        except ValueError as error:
            logger.warning("request %s is computed here: %s", request.request_id, error)
            return
        self._to_load[request.request_id] = remote
        self._awaited[request.request_id] = remote
        self._new.add(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """All tokens of the prompt that the peer has computed, if there is a peer."""
        if request.request_id not in self._to_load:
            return 0, False
        num_new = max(self._num_remote_tokens(request) - num_computed_tokens, 0)
        return num_new, num_new > 0

    def _num_remote_tokens(self, request: Request) -> int:
        """Tokens of the prompt that the peer has, from the first on."""
        told = request.kv_transfer_params.get("remote_num_tokens")
        num_tokens = request.num_prompt_tokens
        return min(num_tokens, told) if type(told) is int else num_tokens

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Asks the worker's half to read the pages that are not in the prefix cache, or to let the
        peer's go."""
        remote = self._to_load.pop(request.request_id, None)
        if remote is None:
            return
        if num_external_tokens <= 0:
            del self._awaited[request.request_id]
            self._next.reqs_to_release[request.request_id] = remote
            return
        local = tuple(
            [0 if block.is_null or block.block_hash is not None else block.block_id for block in group]
            for group in blocks.blocks
        )
        end = self._num_remote_tokens(request)
        num_encoder = sum(
            request.get_num_encoder_embeds(i) for i in range(len(request.mm_features))
        )
        num_tokens = tuple(num_encoder if is_cross else end for is_cross in self._is_cross)
        self._next.reqs_to_recv[request.request_id] = ReqMeta(local, num_tokens, remote)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Requests that have been read need no heartbeat."""
        for request_id in connector_output.finished_recving or ():
            self._awaited.pop(request_id, None)

    # --- A step ---

    def build_connector_meta(self) -> NixlConnectorMetadata:
        """What has come together since the last step."""
        metadata, self._next = self._next, NixlConnectorMetadata()
        now = time.monotonic()
        due: Iterable[str] = self._new  # At once, and alone: many may wait already.
        if now - self._last_heartbeat >= self.options.heartbeat_seconds:
            self._last_heartbeat = now
            due = self._awaited
        metadata.heartbeats = self._heartbeats(due)
        self._new = set()
        return metadata

    def _heartbeats(self, request_ids: Iterable[str]) -> dict[PeerKey, HeartbeatInfo]:
        by_peer: dict[PeerKey, set[str]] = {}
        for remote in (self._awaited[i] for i in request_ids if i in self._awaited):
            by_peer.setdefault(remote.peer_key, set()).add(remote.request_id)
        return {
            peer: HeartbeatInfo(frozenset(ids), peer.host, peer.port)
            for peer, ids in by_peer.items()
        }

    def has_pending_push_work(self) -> bool:
        """Whether the worker's half has something to hear of."""
        meta = self._next
        return bool(meta.reqs_to_send or meta.reqs_to_recv or meta.reqs_to_release)

    # --- A request ends ---

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its pages are kept for a peer, and what the peer is to be told."""
        request_id = request.request_id
        remote = self._to_load.pop(request_id, None)
        self._awaited.pop(request_id, None)
        if remote is not None:
            self._next.reqs_to_release[request_id] = remote
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if not self._is_producer:
            logger.warning(
                "request %s has do_remote_decode, but this engine's kv_role is kv_consumer: its "
                "pages are not kept", request_id,
            )  # fmt: skip
            return False, None
        has_pages = any(any(group) for group in block_ids)
        if request.status not in _ENDED_WELL or not has_pages:
            return False, None
        self._next.reqs_to_send[request_id] = time.monotonic() + self.options.lease_seconds
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in block_ids],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            "remote_port": self._port,
            "tp_size": 1,
            "remote_num_tokens": min(request.num_computed_tokens, request.num_prompt_tokens),
        }

# SPDX-License-Identifier: Apache-2.0
"""What travels: between engines at the handshake, and from the scheduler's half to the worker's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import RegisteredLayer
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ReqId = str
# Changes whenever peers of two versions would not understand each other.
NIXL_CONNECTOR_VERSION: int = 7


@dataclass
class NixlAgentMetadata:
    """What a worker tells peers of its memory.

    kv_caches_base_addr, block_lens: addresses of the regions, and bytes of a page in each.
    kv_cache_layout, attn_backend_name, block_size, physical_blocks_per_logical_kv_block: for people
    who read logs; `layers` says where each page of each layer is, and only that is gone by.
    """

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    kv_cache_layout: str
    block_size: int
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    layers: list[RegisteredLayer] = field(default_factory=list)
    mem_type: str = "DRAM"
    tp_size: int = 1


@dataclass
class NixlHandshakePayload(KVConnectorHandshakeMetadata):
    """First the hash; the metadata (msgpack of `NixlAgentMetadata`) are read only where it is ours.

    side_channel_port: where peers reach this worker.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes
    side_channel_port: int = 0


def compatibility_factors(
    vllm_config: VllmConfig, transfer_mode: str = "pull"
) -> dict[str, str | int]:
    """What two engines must have in common for pages of one to mean the same to the other. Block
    size, layout, backend and parallelism are not among them: those travel as geometry."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "vllm_version": __version__,
        "nixl_connector_version": NIXL_CONNECTOR_VERSION,
        "model": model.model,
        "revision": model.revision or "",
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "cache_dtype": cache.cache_dtype,
        "transfer_mode": transfer_mode,
    }


def compute_nixl_compatibility_hash(
    vllm_config: VllmConfig,
    attn_backend_name: str,
    cross_layers_blocks: bool,
    transfer_mode: str = "pull",
) -> str:
    """Digest of `compatibility_factors`. `attn_backend_name` and `cross_layers_blocks` are
    upstream's and change nothing here: unequal backends are converted."""
    factors = compatibility_factors(vllm_config, transfer_mode)
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


class PeerKey(NamedTuple):
    """An engine, and where it is said to be."""

    engine_id: str
    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    def __str__(self) -> str:
        return f"engine {self.engine_id} at {self.host}:{self.port}"


@dataclass(frozen=True)
class HeartbeatInfo:
    """Requests that wait for pages of one peer; `req_ids` are the peer's ids."""

    req_ids: frozenset[ReqId]
    host: str
    port: int
    tp_size: int = 1


@dataclass(frozen=True)
class RemoteMeta:
    """Where a request's pages are: page ids of each group, and who has them."""

    block_ids: BlockIds
    host: str
    port: int
    engine_id: str
    request_id: str

    @property
    def peer_key(self) -> PeerKey:
        """Who has them."""
        return PeerKey(self.engine_id, self.host, self.port)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> RemoteMeta:
        """Of a request's `kv_transfer_params`.

        Raises:
            ValueError: a field is missing or of a wrong type; says which.
        """
        kinds = {
            "remote_engine_id": str,
            "remote_request_id": str,
            "remote_host": str,
            "remote_port": int,
            "remote_block_ids": (list, tuple),
        }
        wrong = [name for name, kind in kinds.items() if not isinstance(params.get(name), kind)]
        groups = params.get("remote_block_ids")
        if not wrong and not all(_are_page_ids(group) for group in groups):
            wrong = ["remote_block_ids"]
        if not wrong and not _is_port(params["remote_port"]):
            wrong = ["remote_port"]
        if wrong:
            raise ValueError(
                f"kv_transfer_params with do_remote_prefill lacks {', '.join(wrong)}, as the "
                "prefill server's response has it"
            )
        return cls(
            tuple(list(group) for group in groups),
            params["remote_host"],
            params["remote_port"],
            params["remote_engine_id"],
            params["remote_request_id"],
        )


def _is_port(port: int) -> bool:
    return type(port) is int and 0 < port < 1 << 16


def _are_page_ids(group: Any) -> bool:
    return isinstance(group, list | tuple) and all(type(i) is int and i >= 0 for i in group)


@dataclass(frozen=True)
class ReqMeta:
    """A request whose pages are to be read.

    local_block_ids: of each group in the order of the tokens; 0 where nothing is to be read.
    num_tokens: of each group, tokens that are needed, from the first page's first on.
    """

    local_block_ids: BlockIds
    num_tokens: tuple[int, ...]
    remote: RemoteMeta
    tp_size: int = 1


@dataclass
class NixlConnectorMetadata(KVConnectorMetadata):
    """What the worker's half is to do with a step.

    reqs_to_recv: requests whose pages are to be read.
    reqs_to_send: requests that ended here and whose pages are kept, and until when
        (`time.monotonic()`).
    reqs_to_release: requests that will not read what a peer keeps for them.
    heartbeats: by the peer.
    """

    reqs_to_recv: dict[ReqId, ReqMeta] = field(default_factory=dict)
    reqs_to_send: dict[ReqId, float] = field(default_factory=dict)
    reqs_to_release: dict[ReqId, RemoteMeta] = field(default_factory=dict)
    heartbeats: dict[PeerKey, HeartbeatInfo] = field(default_factory=dict)

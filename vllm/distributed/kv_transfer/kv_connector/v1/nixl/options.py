# SPDX-License-Identifier: Apache-2.0
"""Options of the connector."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


@dataclass(frozen=True)
class NixlOptions:
    """`kv_connector_extra_config`.

    lease_seconds: pages are kept that long after their request's end, or after the last heartbeat.
    heartbeat_seconds: between two heartbeats for a request that waits to be read.
    timeout_seconds: for a handshake, and while a request is read from one part to the next.
    staging_bytes: of the buffer for pages that must be converted; none is made before one comes.
    progress_thread: serve peers in a thread that never sleeps, not with each step only. Where the
        network cannot read memory by itself (TCP), reads need not wait for a step then.
    max_peers: engines that are connected at a time; half as many handshakes may be under way.
    peer_idle_seconds: a connection that no request asks for is dropped after that time.

    Raises:
        ValueError: an unknown option, or a value that is no positive number (`max_peers`: whole).
    """

    lease_seconds: float = 60.0
    heartbeat_seconds: float = 5.0
    timeout_seconds: float = 30.0
    staging_bytes: int = 64 << 20
    progress_thread: bool = False
    max_peers: int = 64
    peer_idle_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.progress_thread, bool):
            raise ValueError(
                f"kv_connector_extra_config: progress_thread is {self.progress_thread!r}, "
                "not true or false"
            )
        for field in (field for field in fields(self) if field.name != "progress_thread"):
            value = vars(self)[field.name]
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"kv_connector_extra_config: {field.name} is {value!r}, not > 0")
        if not isinstance(self.max_peers, int):
            raise ValueError(f"kv_connector_extra_config: max_peers is {self.max_peers!r}, not whole")

    @classmethod
    def from_config(cls, config: KVTransferConfig) -> NixlOptions:
        """Those that `config` gives."""
        known = {field.name for field in fields(cls)}
        unknown = config.kv_connector_extra_config.keys() - known
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: NixlConnector has no {', '.join(sorted(unknown))}; "
                f"supported: {', '.join(sorted(known))}"
            )
        return cls(**config.kv_connector_extra_config)

# SPDX-License-Identifier: Apache-2.0
"""The same of this project's connector: its worker reads pages from itself, through its own handshake,
matching and releases; of NIXL there is only what writes down.
"""

import os
import sys
import time
import uuid
from types import ModuleType
from typing import Any

from caches import NAMES, Caches
from judge import Run

HOST, SECONDS = "127.0.0.1", 30


class Library:
    """In the place of `nixl._api.nixl_agent`."""

    last: "Library"

    def __init__(self, name: str, config: Any) -> None:
        self.registered: list[Run] = []
        self.read: list[Run] = []
        Library.last = self

    def register_memory(self, descs: Any, mem_type: str) -> Any:
        self.registered += [(int(desc[0]), int(desc[1])) for desc in descs]
        return descs

    def deregister_memory(self, registered: Any) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"agent"

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_descs(self, rows: Any, mem_type: str) -> list[Run]:
        return [(int(row[0]), int(row[1])) for row in rows]

    def initialize_xfer(self, what: str, into: list[Run], runs: list[Run], peer: str) -> None:
        # The pages asked for are those read to, so that the addresses are the same.
        if sorted(into) != sorted(runs):
            raise RuntimeError("bytes of a page are read to another place of it")
        self.read += runs

    def transfer(self, handle: None) -> str:
        return "DONE"

    def check_xfer_state(self, handle: None) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: None) -> None:
        pass


def transfers_of_ours(
    caches: Caches, vllm_config: Any, pages: range
) -> tuple[list[Run], dict[tuple[int, int], list[Run]]]:
    """As `connector.transfers`."""
    _replace_library()
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlBaseConnectorWorker

    worker = NixlBaseConnectorWorker(vllm_config, str(uuid.uuid4()), caches.config)
    worker.register_kv_caches(caches.tensors)
    library = Library.last
    try:
        runs = {
            (group, page): _read_page(worker, library, group, page)
            for group in range(len(NAMES))
            for page in pages
        }
    finally:
        worker.shutdown()
    return library.registered, runs


def _replace_library() -> None:
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    api.nixl_agent = Library
    api.nixl_agent_config = lambda *args, **kwargs: None
    sys.modules.update({"nixl": package, "nixl._api": api})
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "0"  # Any free one.


def _read_page(worker: Any, library: Library, group: int, page: int) -> list[Run]:
    """What is read when a request wants one page of one group, and no other."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    request = f"request-{group}-{page}"
    port = worker.get_handshake_metadata().side_channel_port
    wanted = tuple([page] if number == group else [] for number in range(len(NAMES)))
    tokens = worker.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
    remote = metadata.RemoteMeta(wanted, HOST, port, worker.engine_id, request)
    asked = metadata.NixlConnectorMetadata(
        reqs_to_recv={
            request: metadata.ReqMeta(wanted, tuple(tokens for _ in NAMES), remote)
        },
        reqs_to_send={request: time.monotonic() + SECONDS},
    )
    library.read.clear()
    worker.start_load_kv(asked)
    deadline = time.monotonic() + SECONDS
    while request not in worker.get_finished(set())[1]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"page {page} of group {group} was not read in {SECONDS} s")
        time.sleep(0.0005)
    failed = worker.get_block_ids_with_load_errors()
    if failed:
        raise RuntimeError(f"page {page} of group {group} could not be read")
    return list(library.read)

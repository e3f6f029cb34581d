# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM's NIXL connector registers for caches, and what it would read for a page.

The library is replaced by one that writes down what it is asked for, so that nothing is sent; the
connector's worker is the real one.
"""

import importlib.util
import inspect
import pkgutil
import uuid
from importlib import import_module
from typing import Any

from caches import NAMES, NUM_PAGES, Caches
from judge import Run

# Page 0 is nobody's: block tables have it where there is no page.
PAGES = range(1, NUM_PAGES)
PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"


class RecordingAgent:
    """In the place of NIXL's agent: descriptors stay what they were made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.registered: list[Run] = []
        self.prepared: list[list[Run]] = []

    def get_reg_descs(self, descs: Any, mem_type: str) -> Any:
        return descs

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        return descs

    def register_memory(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        self.registered += _runs(descs)
        return descs

    def prep_xfer_dlist(self, name: str, descs: Any, *args: Any, **kwargs: Any) -> int:
        self.prepared.append(_runs(descs))
        return len(self.prepared) - 1

    def get_agent_metadata(self) -> bytes:
        return b""

    def release_dlist_handle(self, handle: int) -> None:
        pass

    def deregister_memory(self, descs: Any) -> None:
        pass


def _runs(descs: Any) -> list[Run]:
    return [(int(desc[0]), int(desc[1])) for desc in descs]


def transfers(
    caches: Caches, vllm_config: Any
) -> tuple[list[Run], dict[tuple[int, int], list[Run]]]:
    """Registered regions, and (group, page) -> what is read for it.

    Raises:
        Exception: whatever the connector raises.
    """
    if importlib.util.find_spec(f"{PACKAGE}.nixl.side_channel"):
        from connector_ours import transfers_of_ours

        return transfers_of_ours(caches, vllm_config, PAGES)
    worker_cls = _worker_class()
    arguments = {
        "vllm_config": vllm_config,
        "engine_id": str(uuid.uuid4()),
        "kv_cache_config": caches.config,
    }
    wanted = inspect.signature(worker_cls).parameters
    worker = worker_cls(**{name: arguments[name] for name in wanted})
    worker.register_kv_caches(caches.tensors)
    agent = worker.nixl_wrapper
    [descs] = agent.prepared
    runs = {
        (group, page): [descs[i] for i in _descriptor_ids(worker, group, page)]
        for group in range(len(NAMES))
        for page in PAGES
    }
    return agent.registered, runs


def _worker_class() -> type:
    """The worker of this release, its NIXL replaced wherever it was imported to."""
    try:
        package = import_module(f"{PACKAGE}.nixl")
        names = [f"{PACKAGE}.nixl.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
    except ModuleNotFoundError:
        names = [f"{PACKAGE}.nixl_connector"]
    modules = [import_module(name) for name in names]
    for module in modules:
        if "NixlWrapper" in vars(module):
            module.NixlWrapper = RecordingAgent
            module.nixl_agent_config = lambda *args, **kwargs: None
    return next(m.NixlConnectorWorker for m in modules if "NixlConnectorWorker" in vars(m))


def _descriptor_ids(worker: Any, group: int, page: int) -> list[int]:
    """Which of the prepared descriptors are read for a page, by the worker's own functions."""
    ratio = worker._physical_blocks_per_logical_kv_block
    pages = tuple([page] if number == group else [] for number in range(len(NAMES)))
    to_kernel = worker._logical_to_kernel_block_ids
    takes_ratio = len(inspect.signature(to_kernel).parameters) > 1
    blocks = to_kernel(pages, ratio) if takes_ratio else to_kernel(pages)
    num_blocks = worker.dst_num_blocks[worker.engine_id]
    return [int(i) for i in worker._compute_desc_ids(blocks, num_blocks, None, ratio)]

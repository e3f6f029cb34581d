# SPDX-License-Identifier: Apache-2.0
"""Both ends of a transfer, without engines: real workers, real NIXL, caches of any layout."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from tests.v1.worker.kv_cache_fakes import full_spec, group, shared_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlBaseConnectorWorker
from vllm.utils.math_utils import exact_div
from vllm.v1.attention.kv_cache_plan import observe_layer
from vllm.v1.kv_cache_geometry import storage_bytes
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache

pytest.importorskip("nixl")
HEADS, HEAD_SIZE, NUM_PAGES = 2, 8, 12


@dataclass(frozen=True)
class Layout:
    """One group's: backend, tokens of a page and of a kernel block."""

    backend: type
    tokens_per_page: int = 16
    tokens_per_block: int = 16

    def __str__(self) -> str:
        return f"{self.backend.__name__}-{self.tokens_per_page}-{self.tokens_per_block}"


@dataclass(frozen=True)
class Model:
    """As far as the compatibility hash looks."""

    model: str = "a-model"
    revision: str | None = None
    dtype: str = "float32"
    heads: int = HEADS
    head_size: int = HEAD_SIZE
    layers: int = 2

    def get_total_num_kv_heads(self) -> int:
        return self.heads

    def get_head_size(self) -> int:
        return self.head_size

    def get_total_num_hidden_layers(self) -> int:
        return self.layers


@dataclass
class End:
    """A worker, its caches, and what it reported. Group i has one layer in each of two allocations;
    layer j of every group shares allocation j."""

    worker: NixlBaseConnectorWorker
    caches: dict[str, torch.Tensor]
    key_value: dict[str, tuple[torch.Tensor, torch.Tensor]]
    layouts: tuple[Layout, ...]
    received: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)

    def step(self, finished=frozenset(), **metadata) -> None:
        """As the runner does it."""
        self.worker.start_load_kv(NixlConnectorMetadata(**metadata))
        sent, received = self.worker.get_finished(set(finished))
        assert not sent & self.sent and not received & self.received, "reported twice"
        self.sent |= sent
        self.received |= received
        self.invalid |= self.worker.get_block_ids_with_load_errors()

    def remote(self, block_ids, request_id="r") -> RemoteMeta:
        port = self.worker.get_handshake_metadata().side_channel_port
        return RemoteMeta(block_ids, "localhost", port, self.worker.engine_id, request_id)

    def keep(self, *request_ids: str) -> None:
        """Requests have ended here and their pages are kept."""
        self.step(reqs_to_send={r: time.monotonic() + 1000 for r in request_ids})

    def tokens(self, name: str, pages, num_tokens: int) -> list[torch.Tensor]:
        """K and V of a request's first tokens, (tokens, heads, head size)."""
        layer = self.worker.registration.layers[name]
        per_page, each = layer.geometry.kernel_blocks_per_page, layer.geometry.dim("token").size
        blocks = [page * per_page + i for page in pages for i in range(per_page)]
        return [
            side[blocks].reshape(len(blocks) * each, HEADS, HEAD_SIZE)[:num_tokens]
            for side in self.key_value[name]
        ]

    @property
    def num_pages(self) -> int:
        """Of each layer."""
        return self.worker.registration.num_blocks

    def page_bytes(self, pages, group=0) -> int:
        runs = [self.worker.registration.page_runs(group, page) for page in pages]
        return sum(n for one in runs for _, n in one)


def make_end(
    *layouts: Layout, model: Model = Model(), num_pages=NUM_PAGES, engine_id=None, seed=0, **options
) -> End:
    """An engine's worker with caches of random content. Groups have pages of equal bytes."""
    specs = [
        full_spec(
            one.tokens_per_page,
            model.heads * exact_div(layouts[0].tokens_per_page, one.tokens_per_page)
            if len(layouts) > 1
            else model.heads,
            model.head_size,
            dtype=getattr(torch, model.dtype),
        )
        for one in layouts
    ]
    names = [[f"layers.{layer}.attn{i}" for layer in range(2)] for i in range(len(layouts))]
    groups = [
        group(one.backend, spec, *those, group_id=i)
        for i, (one, spec, those) in enumerate(zip(layouts, specs, names))
    ]
    config = shared_config(num_pages, groups)
    whole = config.kv_cache_tensors[0]
    config.kv_cache_tensors = [
        type(whole)(whole.size, [those[layer] for those in names]) for layer in range(2)
    ]
    raws = {}
    for tensor in config.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        raws.update(dict.fromkeys(tensor.shared_by, raw))
    sizes = [one.tokens_per_block for one in layouts]
    caches = _reshape_kv_cache(groups, raws, "auto", sizes, {}, config)
    generator = torch.Generator().manual_seed(seed)
    key_value = {}
    for one, spec, those in zip(layouts, specs, names):
        for name in those:
            geometry = observe_layer(caches[name], one.backend, spec, "auto", one.tokens_per_block)
            key_value[name] = geometry.key_value(storage_bytes(caches[name]))
    for raw in {id(raw): raw for raw in raws.values()}.values():
        content = raw.view(getattr(torch, model.dtype))
        content.copy_(torch.randn(content.shape, generator=generator))
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda backend=one.backend: backend)
        for one, those in zip(layouts, names)
        for name in those
    }
    vllm_config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=options
        ),
    )
    engine_id = engine_id or f"engine-{uuid.uuid4().hex[:8]}"
    worker = NixlBaseConnectorWorker(vllm_config, engine_id, config)
    worker.register_kv_caches(caches)
    return End(worker, caches, key_value, layouts)


@pytest.fixture
def ends(monkeypatch):
    """Makes ends, and shuts them down."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    made = []

    def make(*layouts, **kwargs) -> End:
        made.append(make_end(*layouts, seed=len(made), **kwargs))
        return made[-1]

    yield make
    for end in made:
        end.worker.shutdown()


def read(decode: End, prefill: End, local, remote, num_tokens, request_id="r") -> None:
    """Reads a request and steps both until that has ended."""
    meta = ReqMeta(local, num_tokens, prefill.remote(remote, request_id))
    decode.step(reqs_to_recv={request_id: meta})
    step_until(lambda: request_id in decode.received, decode, prefill)


def step_until(condition, *some: End, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    for one in itertools.cycle(some):
        if condition():
            return
        assert time.monotonic() < deadline, "nothing happened"
        one.step()
        time.sleep(0.001)

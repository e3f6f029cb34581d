# SPDX-License-Identifier: Apache-2.0
"""Whole pages of prompts, by the tokens that they and all pages before them hold. Written for one KV
cache group, with nothing but what a connector is handed."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

STORE: dict[tuple[str, tuple[int, ...]], object] = {}
"""(layer, tokens up to the page's end) -> the page's content."""
LOADED: list[int] = []
"""Pages loaded, by step."""


@dataclass
class Page:
    block_id: int
    tokens: tuple[int, ...]


@dataclass
class MemoryConnectorMetadata(KVConnectorMetadata):
    loads: list[Page] = field(default_factory=list)
    saves: list[Page] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1):
    """Both halves."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._page_size = vllm_config.cache_config.block_size
        self._kv_caches = {}
        self._to_load: dict[str, int] = {}
        self._requests = {}

    # The scheduler's half

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens = num_computed_tokens
        last = len(request.prompt_token_ids) - 1
        while num_tokens + self._page_size <= last and self._has(request, num_tokens):
            num_tokens += self._page_size
        return num_tokens - num_computed_tokens, False

    def _has(self, request, begin: int) -> bool:
        tokens = tuple(request.prompt_token_ids[: begin + self._page_size])
        return any(known == tokens for _, known in STORE)

    def update_state_after_alloc(self, request, blocks, num_external_tokens) -> None:
        self._requests[request.request_id] = request
        self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output) -> MemoryConnectorMetadata:
        metadata = MemoryConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            num_loaded = self._to_load.pop(new.req_id, 0)
            end = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            for index, block_id in enumerate(new.block_ids[0]):
                page_end = (index + 1) * self._page_size
                if page_end > min(end, len(new.prompt_token_ids)):
                    break
                page = Page(block_id, tuple(new.prompt_token_ids[:page_end]))
                if page_end > new.num_computed_tokens:
                    metadata.saves.append(page)
                elif page_end > new.num_computed_tokens - num_loaded:
                    metadata.loads.append(page)
        return metadata

    def request_finished(self, request, block_ids):
        self._requests.pop(request.request_id, None)
        return False, None

    # The worker's half

    def register_kv_caches(self, kv_caches) -> None:
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs) -> None:
        loads = self._get_connector_metadata().loads
        LOADED.append(len(loads))
        for layer_name, cache in self._kv_caches.items():
            for page in loads:
                cache[page.block_id] = STORE[layer_name, page.tokens]

    def wait_for_layer_load(self, layer_name) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        assert kv_layer is self._kv_caches[layer_name] and attn_metadata is not None
        for page in self._get_connector_metadata().saves:
            STORE[layer_name, page.tokens] = kv_layer[page.block_id].clone()

    def wait_for_save(self) -> None:
        pass

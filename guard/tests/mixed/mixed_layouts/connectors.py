# SPDX-License-Identifier: Apache-2.0
"""KV connectors that move nothing. `Misled` hands an inner one what MISLED says instead of what it is
handed itself, as a connector that wraps another may."""

import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


def fewer_pages(kv_caches):
    return {name: cache[: cache.shape[0] - 1] for name, cache in kv_caches.items()}


def other_memory(kv_caches):
    return {name: torch.zeros_like(cache) for name, cache in kv_caches.items()}


def other_views(kv_caches):
    """Blocks in another order, as one who reads the tensor's memory without its strides may see it."""
    return {
        name: torch.as_strided(cache, cache.shape, (cache.stride(0) // 2, *cache.stride()[1:]))
        for name, cache in kv_caches.items()
    }


def one_missing(kv_caches):
    return dict(list(kv_caches.items())[1:])


class Honest(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()


class Misled(Honest):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.inner = None
        if role == KVConnectorRole.WORKER:
            self.inner = Honest(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches):
        self.inner.register_kv_caches(globals()[os.environ["MISLED"]](kv_caches))

# SPDX-License-Identifier: Apache-2.0
"""Workers: a sound one, and some with one fault each. Each names the backends of its layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm_minimal_platform.worker import MinimalWorker

from tests.kit.broken import backends
from vllm.model_executor.layer_index import extract_layer_index
from vllm.v1.attention import selector
from vllm.v1.attention.kv_cache_plan import plan_layer
from vllm.v1.kv_cache_geometry import storage_bytes
from vllm.v1.kv_cache_interface import KVCacheConfig


class SoundWorker(MinimalWorker):
    """Backends of layers without and with a sliding window."""

    full: type = backends.Sound
    window: type = backends.Sound
    chosen: type[SoundWorker]

    def init_device(self) -> None:
        # Engines of several faults start in one process.
        SoundWorker.chosen = type(self)
        selector._cached_backend.cache_clear()
        super().init_device()

    def layers(self, config: KVCacheConfig) -> Iterator[tuple]:
        """Name, layer and spec of each cache."""
        context = self.vllm_config.compilation_config.static_forward_context
        for group in config.kv_cache_groups:
            for name in group.layer_names:
                yield name, context[name], group.kv_cache_spec


class HeadsFirstWorker(SoundWorker):
    """Makes views head by head of caches that are declared token by token."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        for _, layer, _ in self.layers(kv_cache_config):
            cache = layer.kv_cache
            flat = storage_bytes(cache).view(cache.dtype)[: cache.numel()]
            layer.kv_cache = flat.view(cache.shape)


class UnalignedWorker(SoundWorker):
    """Gives each layer the layout of its backend, whatever else lies there."""

    full = backends.KVFirst

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        for _, layer, spec in self.layers(kv_cache_config):
            raw = storage_bytes(layer.kv_cache)
            sizes = spec.block_size, raw.numel()
            layer.kv_cache = plan_layer(layer.get_attn_backend(), spec, "auto", *sizes).view(raw)


class ByIndexWorker(SoundWorker):
    """Says that it takes several caches of one layer index, and binds by the index."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        for name, layer, _ in self.layers(kv_cache_config):
            layer.kv_cache = self.model_runner.kv_caches[extract_layer_index(name)]


class MovingWorker(SoundWorker):
    """Moves its caches once a connector has registered them."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.vllm_config.kv_transfer_config is None:
            return
        moved: dict[int, torch.Tensor] = {}
        for _, layer, _ in self.layers(kv_cache_config):
            old = layer.kv_cache
            raw = storage_bytes(old)
            new = moved.setdefault(raw.data_ptr(), raw.clone()).view(old.dtype)
            layer.kv_cache = new.as_strided(old.shape, old.stride(), old.storage_offset())


class SilentWorker(SoundWorker):
    """Does not start, for a reason that is no refusal."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        raise RuntimeError("device 7 does not answer")


class ContiguousWorker(SoundWorker):
    full = window = backends.Contiguous


class SixteenTokensWorker(SoundWorker):
    full = window = backends.SixteenTokens


class AssertsWorker(SoundWorker):
    full = window = backends.Asserts


class UnmaskedWorker(SoundWorker):
    full = window = backends.Unmasked


class WrongScaleWorker(SoundWorker):
    full = window = backends.WrongScale


class RaisesWorker(SoundWorker):
    full = window = backends.Raises


class DiesWorker(SoundWorker):
    full = window = backends.Dies


class AlignedWorker(SoundWorker):
    """Two layouts, aligned by the engine's runner: no fault."""

    full = backends.KVFirst

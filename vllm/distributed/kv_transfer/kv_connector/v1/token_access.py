# SPDX-License-Identifier: Apache-2.0
"""Keys and values of single tokens in the paged caches, whatever their layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.utils.math_utils import exact_div
from vllm.v1.attention.kv_cache_plan import backend_layout, observe_layer
from vllm.v1.kv_cache_geometry import storage_bytes
from vllm.v1.kv_cache_interface import AttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class LayerTokens:
    """One layer's cache. `parts`: K, V and scales, each a view (kernel blocks, tokens, heads, ...)
    over the cache itself."""

    group: int
    spec: KVCacheSpec
    parts: dict[str, torch.Tensor]
    kernel_blocks_per_page: int

    def read(self, pages: Sequence[int], begin: int, end: int) -> dict[str, torch.Tensor]:
        """Copies on the host, (end - begin, heads, ...), of tokens `[begin, end)` of a request with
        these pages."""
        places = self._places(pages, begin, end)
        return {name: part[places].cpu() for name, part in self.parts.items()}

    def write(
        self, pages: Sequence[int], begin: int, tokens: dict[str, torch.Tensor]
    ) -> None:
        """Puts tokens from `begin` on into the pages; those whose page is 0, the null page, are left
        out. `tokens` has passed `check`."""
        size = self.spec.block_size
        num_tokens = len(next(iter(tokens.values())))
        kept = [i for i in range(num_tokens) if pages[(begin + i) // size] != 0]
        if not kept:
            return
        rows = torch.tensor(kept)
        blocks, offsets = self._places(pages, begin, begin + num_tokens)
        for name, part in self.parts.items():
            values = tokens[name][rows].to(part.device)
            part[blocks[rows], offsets[rows]] = values

    def check(self, tokens: dict[str, torch.Tensor]) -> None:
        """Raises:
        ValueError: the parts are not those of this cache.
        """
        for name, part in self.parts.items():
            given = tokens.get(name)
            wanted = (part.dtype, tuple(part.shape[2:]))
            if given is None or (given.dtype, tuple(given.shape[1:])) != wanted:
                found = None if given is None else (given.dtype, tuple(given.shape[1:]))
                raise ValueError(f"{name} should be {wanted}, not {found}")

    def _places(
        self, pages: Sequence[int], begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernel block and place in it of each token."""
        size = self.spec.block_size
        tokens_per_block = exact_div(size, self.kernel_blocks_per_page)
        positions = torch.arange(begin, end)
        table = torch.tensor(list(pages), dtype=torch.int64)
        in_page = positions % size
        blocks = table[positions // size] * self.kernel_blocks_per_page
        return blocks + in_page // tokens_per_block, in_page % tokens_per_block


def access_layers(
    kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> dict[str, LayerTokens]:
    """Each layer's cache, token by token.

    Raises:
        ValueError: a layer keeps a state, or its backend does not say where K and V are.
    """
    layers = vllm_config.compilation_config.static_forward_context
    cache_dtype = vllm_config.cache_config.cache_dtype
    found = {}
    for group, group_spec in enumerate(kv_cache_config.kv_cache_groups):
        spec = group_spec.kv_cache_spec
        for name in group_spec.layer_names:
            if not isinstance(spec, AttentionSpec):
                raise ValueError(f"layer {name} keeps a state, not keys and values of tokens")
            backend, cache = layers[name].get_attn_backend(), kv_caches[name]
            roles = backend_layout(backend, cache_dtype).roles
            tokens_per_block = cache.shape[roles.index("token")]
            geometry = observe_layer(cache, backend, spec, cache_dtype, tokens_per_block)
            raw = storage_bytes(cache)
            parts = {part.name: geometry.part(raw, part.name) for part in geometry.parts}
            if not parts:
                raise ValueError(
                    f"layer {name}: {backend.__name__} does not say where keys and values are"
                )
            found[name] = LayerTokens(group, spec, parts, geometry.kernel_blocks_per_page)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Zeroing and copying pages, wherever a layer keeps their bytes.

Layers that share pages are gone through once: a page copied twice would be a chain of copies gone
astray (1 -> 2 and 2 -> 3 done again put page 1's old bytes into page 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vllm.v1.kv_cache_geometry import KVCacheGeometry, Ownership, storage_bytes


class PageBytes:
    """The bytes of the pages of several caches, each page once."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, Ownership], torch.Tensor] = {}

    def add(self, kv_cache: torch.Tensor, geometry: KVCacheGeometry) -> None:
        """`geometry`: of `kv_cache`, its offset from the start of the storage."""
        key = kv_cache.untyped_storage().data_ptr(), geometry.ownership()
        if key not in self._views:
            self._views[key] = geometry.page_view(storage_bytes(kv_cache))

    def zero(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros.

        Raises:
            IndexError: a cache has no such page.
        """
        for view in self._views.values():
            view.index_fill_(0, _index(pages, view), 0)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Each destination gets what its source held before any was written.

        Raises:
            IndexError: a cache has no such page.
        """
        for view in self._views.values():
            held = view.index_select(0, _index(sources, view))
            view.index_copy_(0, _index(destinations, view), held)


def _index(pages: Sequence[int], view: torch.Tensor) -> torch.Tensor:
    num_pages = view.shape[0]
    wrong = [page for page in pages if not 0 <= page < num_pages]
    if wrong:
        raise IndexError(f"page {wrong[0]} of a KV cache of {num_pages}")
    return torch.tensor(pages, dtype=torch.int64, device=view.device)


def observe_blocks(kv_cache: torch.Tensor, num_blocks: int) -> KVCacheGeometry:
    """The geometry of a cache of `num_blocks` pages of which nothing else is known: one dimension,
    and no other, is that number of pages times kernel blocks.

    Raises:
        ValueError: several dimensions may be, or none.
    """
    may_be = [d for d, size in enumerate(kv_cache.shape) if size % num_blocks == 0]
    if len(may_be) != 1:
        raise ValueError(
            f"no telling which dimension of a KV cache {tuple(kv_cache.shape)} is {num_blocks} "
            "blocks; pass `geometries`"
        )
    roles = ["block" if d == may_be[0] else "content" for d in range(kv_cache.dim())]
    per_page = kv_cache.shape[may_be[0]] // num_blocks
    return KVCacheGeometry.observe(kv_cache, roles, kernel_blocks_per_page=per_page, fields=())


def flatten(kv_caches: Iterable[torch.Tensor | list[torch.Tensor]]) -> list[torch.Tensor]:
    """Caches of layers; a recurrent layer may have a list of them."""
    lists = (cache if isinstance(cache, list) else [cache] for cache in kv_caches)
    return [cache for caches in lists for cache in caches]

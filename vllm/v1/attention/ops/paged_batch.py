# SPDX-License-Identifier: Apache-2.0
"""A ragged batch of requests over a paged cache, as kernels that are launched from the host see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch


@dataclass
class PagedBatch:
    """R requests, one after the other.

    query_start_loc: (R + 1,) int32, where each request's tokens begin; query_start_loc_cpu: on the
        host
    seq_lens: (R,) int32, keys of a request; with `causal` its tokens are the last of them
    block_table: (R, columns) int32, kernel blocks that hold them
    max_seq_len: the longest of `seq_lens`, or more
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int
    causal: bool = True
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    @cached_property
    def num_decodes(self) -> int:
        """Requests at the head of the batch that have one token each."""
        others = np.flatnonzero(self._query_lens != 1)
        return int(others[0]) if len(others) else self.num_reqs

    def prefill_tiles(self, tokens_per_tile: int) -> torch.Tensor:
        """The tokens of the requests behind the decodes, cut up: (tiles, 2) int32 on the device,
        request and its first token of the tile. Made once for the layers of a step."""
        if tokens_per_tile not in self._tiles:
            counts = -(-self._query_lens // tokens_per_tile)
            counts[: self.num_decodes] = 0
            requests = np.repeat(np.arange(self.num_reqs, dtype=np.int32), counts)
            before = np.repeat(np.cumsum(counts) - counts, counts)
            first = (np.arange(len(requests)) - before) * tokens_per_tile
            tiles = np.stack((requests, first.astype(np.int32)), axis=1)
            device = self.seq_lens.device
            self._tiles[tokens_per_tile] = torch.from_numpy(tiles).to(device, non_blocking=True)
        return self._tiles[tokens_per_tile]

    @cached_property
    def _query_lens(self) -> np.ndarray:
        return np.diff(self.query_start_loc_cpu.numpy()[: self.num_reqs + 1])

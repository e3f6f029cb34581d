# SPDX-License-Identifier: Apache-2.0
"""Block tables: which kernel blocks hold a request's tokens, for each KV cache group.

The scheduler hands out *pages*; a page of `block_size` tokens is `r = block_size //
kernel_block_size` kernel blocks, `page * r ... page * r + r - 1`, which is what the table holds.
"""

from __future__ import annotations

import numpy as np

from vllm.utils.math_utils import cdiv, exact_div


class BlockTable:
    """One group's table: (max_num_reqs, max_blocks) int32, a row a request. `holds_encoder`: its
    pages hold the encoder's tokens, not the request's own."""

    def __init__(
        self,
        block_size: int,
        kernel_block_size: int,
        max_num_reqs: int,
        max_num_pages: int,
        holds_encoder: bool = False,
    ) -> None:
        self.holds_encoder = holds_encoder
        self.kernel_block_size = kernel_block_size
        self.blocks_per_page = exact_div(block_size, kernel_block_size)
        self.max_num_blocks = max_num_pages * self.blocks_per_page
        self.table = np.zeros((max_num_reqs, self.max_num_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int32)

    def append(self, row: int, page_ids: list[int], overwrite: bool) -> None:
        """Adds pages to a row, after those it has or, with `overwrite`, in their place."""
        begin = 0 if overwrite else int(self.num_blocks[row])
        blocks = np.asarray(page_ids, dtype=np.int32)
        if self.blocks_per_page > 1:
            inside = np.arange(self.blocks_per_page, dtype=np.int32)
            blocks = (blocks[:, None] * self.blocks_per_page + inside).reshape(-1)
        self.table[row, begin : begin + len(blocks)] = blocks
        self.num_blocks[row] = begin + len(blocks)

    def gather(self, rows: np.ndarray, max_seq_len: int, out: np.ndarray) -> int:
        """Copies what a batch of up to `max_seq_len` tokens a request needs of `rows` to the head of
        `out` (max_num_reqs, max_blocks); returns how wide that is."""
        width = min(cdiv(max_seq_len, self.kernel_block_size), self.max_num_blocks)
        out[: len(rows), :width] = self.table[rows, :width]
        return width

    def slots(self, token_rows: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """Writes where each token's K and V go: block id * block size + place in the block.

        token_rows: (num_tokens,) row of each token's request; positions: (num_tokens,).
        """
        block_index, place = np.divmod(positions, self.kernel_block_size)
        slots = out[: len(positions)]
        slots[:] = self.table[token_rows, block_index]
        slots *= self.kernel_block_size
        slots += place


class BlockTables:
    """The tables of all groups."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_blocks_per_group: list[int],
        kernel_block_sizes: list[int],
        encoder_groups: frozenset[int] = frozenset(),
    ) -> None:
        sizes = zip(block_sizes, kernel_block_sizes, max_num_blocks_per_group, strict=True)
        self.tables = [
            BlockTable(block_size, kernel_block_size, max_num_reqs, max_num_pages, i in encoder_groups)
            for i, (block_size, kernel_block_size, max_num_pages) in enumerate(sizes)
        ]

    def num_pages_seen(self) -> int:
        """One more than the highest page that a row has, or had and no other row took its place."""
        return 1 + max(int(t.table.max()) // t.blocks_per_page for t in self.tables)

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Adds each group's new pages to row `req_index`."""
        for table, page_ids in zip(self.tables, new_block_ids, strict=True):
            table.append(req_index, page_ids, overwrite)

# SPDX-License-Identifier: Apache-2.0
"""Sizes of the attention kernel's tiles. BLOCK and CHUNK decide the order of sums, the others
only speed.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 64  # keys packed at a time
CHUNK: Final = 256  # keys over which softmax state is kept before it is merged; a multiple of BLOCK
ROWS: Final = 96  # query rows (tokens x heads of a group) of a tile
SPLIT_ROWS: Final = 32  # up to so many rows of a request are split over threads chunk by chunk
NARROW_ROWS: Final = 4  # tiles of up to so many rows are computed without copies of keys and values
NARROW_VALUES: Final = 64  # whose head size is a multiple of this
ALL_HEADS_CHUNKS: Final = 16  # single tokens of so many chunks a thread: a tile for all heads
SHARES: Final = 2  # a thread takes the half of what is left for each

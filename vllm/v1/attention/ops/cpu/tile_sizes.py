# SPDX-License-Identifier: Apache-2.0
"""Sizes of the attention kernel's tiles. BLOCK and CHUNK decide the order of sums, the others
only speed.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 128  # keys packed at a time
CHUNK: Final = 256  # keys over which softmax state is kept before it is merged; a multiple of BLOCK
ROWS: Final = 96  # query rows (tokens x heads of a group) of a tile
SPLIT_ROWS: Final = 32  # up to so many rows of a request are split over threads chunk by chunk

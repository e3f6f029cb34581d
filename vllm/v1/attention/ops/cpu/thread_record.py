# SPDX-License-Identifier: Apache-2.0
"""A thread's record in the attention kernel, byte offsets of int64 words: where its scratch is,
which tile it works on, and which comes then.
"""

from __future__ import annotations

ZEROS, K_ROWS, V_ROWS, Q, K, V, S, P, ACC, TOTAL, STATE, TOTAL_STATE = range(0, 96, 8)
PADDED_K, PADDED_V = range(96, 112, 8)
TURN = 112  # byte offset of the half of K_ROWS and V_ROWS that holds the block at work
LOCATED = 120  # whether the other tile's first block is in them already
HEAD = 128  # which of the tile's KV heads is at work, from 0 on
# A tile: its rows, of HEADS heads from KV_HEAD on; the keys that any of them sees, [LOW, HIGH); the
# blocks of keys at work, [START, END); of a chunk of a split tile its number among CHUNKS, else CHUNKS
# is 0.
REQUEST, KV_HEAD, FIRST_TOKEN, TOKENS, POSITION, LOW, HIGH, START, END = range(136, 208, 8)
INDEX, CHUNKS, FIRST_ROW, HEADS = range(208, 240, 8)
TILE_BYTES = 104
NEXT = TILE_BYTES  # from a tile's word to the next tile's
COUNT = 136 // 8 + 2 * TILE_BYTES // 8

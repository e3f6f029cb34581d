# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernels `plan` and `attend`: byte offsets of int64 words (the last two:
float64). Strides in bytes.
"""

from __future__ import annotations

TICKET, NEXT_ITEM, NUM_ITEMS, PARTIAL_BYTES, THREAD_BYTES = range(0, 40, 8)
Q, Q_TOKEN, Q_HEAD = range(40, 64, 8)
K, K_BLOCK, K_TOKEN, K_HEAD = range(64, 96, 8)
V, V_BLOCK, V_TOKEN, V_HEAD = range(96, 128, 8)
OUT, OUT_TOKEN, OUT_HEAD = range(128, 152, 8)
QUERY_START, SEQ_LENS, BLOCK_TABLE, TABLE_STRIDE = range(152, 184, 8)
NUM_REQUESTS, NUM_KV_HEADS, GROUP, HEAD_SIZE, TOKENS_PER_BLOCK = range(184, 224, 8)
CAUSAL, WINDOW, ALIBI, SINKS, PREFIX, SCRATCH, PARTIAL = range(224, 280, 8)
MOST_PARTIAL_ROWS = 280  # a request whose partial results do not fit any more isn't split
SHARES = 288  # a thread takes one of so many shares of the items that are left
ALL_HEADS = 296  # whether a tile of a single token has all KV heads; `plan` decides
SCALE, SOFT_CAP = range(304, 320, 8)
FORMAT = "38q2d"

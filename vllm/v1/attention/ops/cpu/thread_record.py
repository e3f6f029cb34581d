# SPDX-License-Identifier: Apache-2.0
"""A thread's record in the attention kernel, byte offsets of int64 words: where its scratch is,
which tile it works on.
"""

from __future__ import annotations

ZEROS, K_ROWS, V_ROWS, Q, K, V, S, P, ACC, TOTAL, STATE, TOTAL_STATE = range(0, 96, 8)
PADDED_K, PADDED_V = range(96, 112, 8)
REQUEST, KV_HEAD, FIRST_TOKEN, TOKENS, POSITION, LOW, HIGH = range(112, 168, 8)
COUNT = 21

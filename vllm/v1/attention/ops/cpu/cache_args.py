# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernel `cache`: byte offsets of int64 words. Strides in bytes; STEP: tokens
taken at a time.
"""

from __future__ import annotations

NEXT, STEP, NUM_TOKENS, SLOTS = range(0, 32, 8)
KEY, KEY_TOKEN, KEY_HEAD, K, K_BLOCK, K_TOKEN, K_HEAD, K_BYTES = range(32, 96, 8)
VALUE, VALUE_TOKEN, VALUE_HEAD, V, V_BLOCK, V_TOKEN, V_HEAD, V_BYTES = range(96, 160, 8)
TOKENS_PER_BLOCK, NUM_KV_HEADS = range(160, 176, 8)
FORMAT = "22q"

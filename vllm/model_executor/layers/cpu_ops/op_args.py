# SPDX-License-Identifier: Apache-2.0
"""Arguments of the small kernels: byte offsets of int64 words (EPS: float64). Strides are in bytes.

Each record begins with NEXT (the atomic counter), STEP (rows taken at a time) and ROWS.
"""

from __future__ import annotations

NEXT, STEP, ROWS = range(0, 24, 8)

NORM_X, NORM_X_ROW, NORM_RESIDUAL, NORM_RESIDUAL_ROW, NORM_OUT, NORM_OUT_ROW = range(24, 72, 8)
NORM_WEIGHT, NORM_BIAS, NORM_SIZE, NORM_EPS = range(72, 104, 8)
NORM_FORMAT = "12qd"

GATE_X, GATE_X_ROW, GATE_OUT, GATE_OUT_ROW, GATE_SIZE = range(24, 64, 8)
GATE_FORMAT = "8q"

# Keys go to K_OUT (in place), or, where SLOTS is not 0, to their slots in the cache, values with
# them.
ROTARY_POSITIONS, ROTARY_TABLE, ROTARY_TABLE_ROW, ROTARY_DIM, ROTARY_HEAD_SIZE, ROTARY_NEOX = range(
    24, 72, 8
)
ROTARY_Q, ROTARY_Q_ROW, ROTARY_Q_HEAD, ROTARY_Q_HEADS = range(72, 104, 8)
ROTARY_K, ROTARY_K_ROW, ROTARY_K_HEAD, ROTARY_K_HEADS = range(104, 136, 8)
ROTARY_V, ROTARY_V_ROW, ROTARY_V_HEAD, ROTARY_V_SIZE = range(136, 168, 8)
ROTARY_SLOTS, ROTARY_TOKENS_PER_BLOCK = range(168, 184, 8)
ROTARY_KC, ROTARY_KC_BLOCK, ROTARY_KC_TOKEN, ROTARY_KC_HEAD = range(184, 216, 8)
ROTARY_VC, ROTARY_VC_BLOCK, ROTARY_VC_TOKEN, ROTARY_VC_HEAD = range(216, 248, 8)
ROTARY_FORMAT = "31q"

GEMV_X, GEMV_X_ROW, GEMV_W, GEMV_W_ROW, GEMV_BIAS, GEMV_OUT, GEMV_OUT_ROW, GEMV_M, GEMV_K = range(
    24, 96, 8
)
GEMV_FORMAT = "12q"

# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernels for quantised weights: byte offsets of int64 words, strides in bytes.

Each record begins with NEXT, STEP and ROWS (see op_args.py).
"""

from __future__ import annotations

from typing import Final

# A row of quantised inputs: for each group GROUP int8 values and four words about them.
X_SCALE, X_MINUS_128, X_MINUS_8, X_SUM, X_GROUP_BYTES = 32, 36, 40, 44, 48

# QUANT_READY: address of quantised rows, or 0: each thread quantises X itself, on its stack.
QUANT_X, QUANT_X_ROW, QUANT_READY, QUANT_W, QUANT_PANEL_BYTES = range(24, 64, 8)
QUANT_BIAS, QUANT_BIAS_PANEL, QUANT_OUT, QUANT_OUT_ROW = range(64, 96, 8)
QUANT_M, QUANT_GROUPS, QUANT_PANELS = range(96, 120, 8)
QUANT_FORMAT: Final = "15q"
STACK_BYTES: Final = 48 * 1024

ROWS_X, ROWS_X_ROW, ROWS_OUT, ROWS_GROUPS = range(24, 56, 8)
ROWS_FORMAT: Final = "7q"

LOOKUP_IDS, LOOKUP_TABLE, LOOKUP_PANEL_BYTES, LOOKUP_GROUPS, LOOKUP_OUT = range(24, 64, 8)
LOOKUP_FORMAT: Final = "8q"

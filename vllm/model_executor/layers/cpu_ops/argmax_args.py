# SPDX-License-Identifier: Apache-2.0
"""Arguments of `argmax` behind the three that each record begins with (op_args.py): byte offsets of
int64 words. X_ROW in bytes; PLACES int32, LOWEST one byte, one each a row."""

from __future__ import annotations

X, X_ROW, SIZE, PLACES, IS_LOWEST = range(24, 64, 8)
FORMAT = "8q"

# SPDX-License-Identifier: Apache-2.0
"""Arguments of `argmax` behind the three that each record begins with (op_args.py): byte offsets of
int64 words. X_ROW in bytes; INDICES int64, VALUES float32, one a row."""

from __future__ import annotations

X, X_ROW, SIZE, INDICES, VALUES = range(24, 64, 8)
FORMAT = "8q"

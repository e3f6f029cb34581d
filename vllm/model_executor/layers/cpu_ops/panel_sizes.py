# SPDX-License-Identifier: Apache-2.0
"""Sizes of packed weights and of the products with them."""

from __future__ import annotations

from typing import Final

PANEL: Final = 32  # outputs of a panel: two vectors of sums
MAX_ROWS: Final = 192  # rows of x that stay in the cache while panels pass
SHARES: Final = 2  # a thread takes the half of what is left for each

# SPDX-License-Identifier: Apache-2.0
"""How weights of 8 and 4 bits are kept for the CPU's products.

A weight (N, K) is cut along K into groups of GROUP. A *block* is one output's group, as GGUF has it
(int8 is its Q8_0 with the codes counted from -128, int4 its Q4_0, int4_min its Q4_1):

    scale (float16) [, minimum (float16)], codes
    int8      code - 0 .. 255 stand for -128 .. 127        value = scale * (code - 128)
    int4      code - 0 .. 15  stand for -8 .. 7            value = scale * (code - 8)
    int4_min  code - 0 .. 15                               value = scale * code + minimum

Byte j of 4-bit codes has input j below and input j + 16 above. A *panel* is PANEL outputs:

    for each group: PANEL scales [, PANEL minimums], then for each word (4 bytes of codes) of a block
    that word of outputs 0 .. PANEL - 1

so that a product reads a panel from end to end. Packed: uint8 (N / PANEL, bytes of a panel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PANEL: Final = 32
GROUP: Final = 32


@dataclass(frozen=True)
class QuantFormat:
    """One way to keep a group. `zero_code` stands for 0 where there is no minimum."""

    name: str
    bits: int
    has_min: bool

    @property
    def header_bytes(self) -> int:
        """Of a block: its scale and minimum."""
        return 4 if self.has_min else 2

    @property
    def num_words(self) -> int:
        """Of a block's codes, 4 bytes each."""
        return GROUP * self.bits // 32

    @property
    def block_bytes(self) -> int:
        """Of a block."""
        return self.header_bytes + 4 * self.num_words

    @property
    def zero_code(self) -> int:
        """The code of 0; 0 where a minimum says what codes stand for."""
        return 0 if self.has_min else 1 << (self.bits - 1)


INT8: Final = QuantFormat("int8", 8, False)
INT4: Final = QuantFormat("int4", 4, False)
INT4_MIN: Final = QuantFormat("int4_min", 4, True)
FORMATS: Final = (INT8, INT4, INT4_MIN)
FORMAT_BY_NAME: Final = {fmt.name: fmt for fmt in FORMATS}
FORMAT_BY_BLOCK_BYTES: Final = {fmt.block_bytes: fmt for fmt in FORMATS}

# SPDX-License-Identifier: Apache-2.0
"""Weights to blocks of codes, blocks to panels, and back. The layouts are in quant_format.py."""

from __future__ import annotations

import torch

from .quant_format import GROUP, PANEL, QuantFormat

_ROWS_AT_A_TIME = 2048
_LEAST_SCALE, _MOST_SCALE = 2.0**-24, 65504.0  # of float16
# Scales of 4 bits to try, in parts of the one that reaches the largest magnitude.
_CANDIDATES = (1.0, 0.92, 0.84)


def fills_panels(num_outputs: int, num_inputs: int) -> bool:
    """Whether a weight of this size can be packed."""
    return (
        num_outputs > 0
        and num_inputs > 0
        and num_outputs % PANEL == 0
        and num_inputs % GROUP == 0
    )


def quantize(weight: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """A weight (N, K) to blocks uint8 (N, K / GROUP, block_bytes), rounded to the nearest code.

    int8: the scale is the largest magnitude over 127. int4: it puts the largest magnitude at -8, or
    is one of a few smaller ones, whichever has the least squared error.
    """
    n, k = weight.shape
    blocks = torch.empty(n, k // GROUP, fmt.block_bytes, dtype=torch.uint8)
    for first in range(0, n, _ROWS_AT_A_TIME):
        rows = weight[first : first + _ROWS_AT_A_TIME].float().view(-1, k // GROUP, GROUP)
        into = blocks[first : first + _ROWS_AT_A_TIME]
        if fmt.bits == 8:
            _quantize8(rows, fmt, into)
        else:
            _quantize4(rows, fmt, into)
    return blocks


def _float16_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales as float16 keeps them, none of them 0."""
    sign = torch.where(scale < 0, -1.0, 1.0)
    return (scale.abs().clamp_(_LEAST_SCALE, _MOST_SCALE) * sign).half()


def _codes(rows: torch.Tensor, scale: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """float32 codes of values (N, groups, GROUP) by scales (N, groups, 1)."""
    zero = fmt.zero_code
    low = 1 if fmt.bits == 8 else 0  # int8 is symmetric
    return (rows / scale).round_().add_(zero).clamp_(low, 2 * zero - 1)


def _quantize8(rows: torch.Tensor, fmt: QuantFormat, into: torch.Tensor) -> None:
    scale = _float16_scale(rows.abs().amax(-1, keepdim=True) / 127)
    into[..., : fmt.header_bytes] = scale.view(torch.uint8)
    into[..., fmt.header_bytes :] = _codes(rows, scale.float(), fmt).to(torch.uint8)


def _quantize4(rows: torch.Tensor, fmt: QuantFormat, into: torch.Tensor) -> None:
    where = rows.abs().argmax(-1, keepdim=True)
    widest = rows.gather(-1, where) / -8
    best_error = best_scale = best_codes = None
    for part in _CANDIDATES:
        scale = _float16_scale(widest * part)
        codes = _codes(rows, scale.float(), fmt)
        error = ((codes - fmt.zero_code) * scale.float() - rows).square_().sum(-1, keepdim=True)
        if best_error is None:
            best_error, best_scale, best_codes = error, scale, codes
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better, codes, best_codes)
    codes = best_codes.to(torch.uint8)
    half = GROUP // 2
    into[..., : fmt.header_bytes] = best_scale.view(torch.uint8)
    into[..., fmt.header_bytes :] = codes[..., :half] | (codes[..., half:] << 4)


def pack_blocks(blocks: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """Blocks uint8 (N, groups, block_bytes) to panels uint8 (N / PANEL, bytes of a panel)."""
    n, groups, _ = blocks.shape
    header, words = fmt.header_bytes, fmt.num_words
    packed = torch.empty(n // PANEL, groups, PANEL * fmt.block_bytes, dtype=torch.uint8)
    split = blocks.view(n // PANEL, PANEL, groups, fmt.block_bytes)
    halves = split[..., :header].contiguous().view(torch.int16)
    packed[..., : PANEL * header].view(torch.int16).unflatten(-1, (-1, PANEL)).copy_(
        halves.permute(0, 2, 3, 1)
    )
    codes = split[..., header:].contiguous().view(torch.int32)
    packed[..., PANEL * header :].view(torch.int32).unflatten(-1, (words, PANEL)).copy_(
        codes.permute(0, 2, 3, 1)
    )
    return packed.view(n // PANEL, -1)


def unpack_blocks(packed: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """The blocks that were packed."""
    panels, header, words = packed.shape[0], fmt.header_bytes, fmt.num_words
    split = packed.view(panels, -1, PANEL * fmt.block_bytes)
    groups = split.shape[1]
    halves = split[..., : PANEL * header].view(torch.int16).unflatten(-1, (-1, PANEL))
    codes = split[..., PANEL * header :].view(torch.int32).unflatten(-1, (words, PANEL))
    blocks = torch.empty(panels, PANEL, groups, fmt.block_bytes, dtype=torch.uint8)
    blocks[..., :header] = halves.permute(0, 3, 1, 2).contiguous().view(torch.uint8)
    blocks[..., header:] = codes.permute(0, 3, 1, 2).contiguous().view(torch.uint8)
    return blocks.view(panels * PANEL, groups, fmt.block_bytes)


def dequantize(blocks: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """The values of blocks (N, groups, block_bytes): float32 (N, K)."""
    header, half = fmt.header_bytes, GROUP // 2
    scales = blocks[..., :header].contiguous().view(torch.float16).float()
    codes = blocks[..., header:].int()
    if fmt.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    values = (codes - fmt.zero_code) * scales[..., :1]
    if fmt.has_min:
        values += scales[..., 1:]
    return values.view(blocks.shape[0], -1)

# SPDX-License-Identifier: Apache-2.0
"""Weights to blocks of codes, blocks to panels, and back. The layouts are in quant_format.py."""

from __future__ import annotations

import torch

from .quant_format import GROUP, INT4_MIN, INT8, PANEL, QuantFormat
from .weight_memory import empty_weight

_ROWS_AT_A_TIME = 2048
_LEAST_SCALE, _MOST_SCALE = 2.0**-24, 65504.0  # of float16


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

    int8: the scale is the largest magnitude over 127. int4_min: codes reach from the least value to
    the largest; where the line of least squares through those codes has a smaller error, it is that.

    Raises:
        ValueError: the format is int4, which comes from files alone.
    """
    if fmt not in _QUANTIZERS:
        raise ValueError(f"nothing is quantised to {fmt.name}")
    n, k = weight.shape
    blocks = torch.empty(n, k // GROUP, fmt.block_bytes, dtype=torch.uint8)
    for first in range(0, n, _ROWS_AT_A_TIME):
        rows = weight[first : first + _ROWS_AT_A_TIME].float().view(-1, k // GROUP, GROUP)
        _QUANTIZERS[fmt](rows, blocks[first : first + _ROWS_AT_A_TIME])
    return blocks


def _float16_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales, not negative, as float16 keeps them, none of them 0."""
    return scale.clamp(_LEAST_SCALE, _MOST_SCALE).half()


def _quantize8(rows: torch.Tensor, into: torch.Tensor) -> None:
    scale = _float16_scale(rows.abs().amax(-1, keepdim=True) / 127)
    codes = (rows / scale.float()).round_().add_(INT8.zero_code)
    into[..., : INT8.header_bytes] = scale.view(torch.uint8)
    into[..., INT8.header_bytes :] = codes.clamp_(1, 255).to(torch.uint8)  # symmetric


def _quantize4_min(rows: torch.Tensor, into: torch.Tensor) -> None:
    least, most = rows.aminmax(dim=-1, keepdim=True)
    header, codes, error = _round4(rows, (most - least) / 15, least)
    header2, codes2, error2 = _round4(rows, *_fit_line(rows, codes))
    better = error2 < error
    codes = torch.where(better, codes2, codes).to(torch.uint8)
    half = GROUP // 2
    into[..., : INT4_MIN.header_bytes] = torch.where(better, header2, header).view(torch.uint8)
    into[..., INT4_MIN.header_bytes :] = codes[..., :half] | (codes[..., half:] << 4)


def _round4(rows: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> tuple:
    """(float16 scale and minimum, float32 codes, squared error) of groups in the last dimension."""
    scale, minimum = _float16_scale(scale), minimum.clamp(-_MOST_SCALE, _MOST_SCALE).half()
    wide_scale, wide_minimum = scale.float(), minimum.float()
    codes = ((rows - wide_minimum) / wide_scale).round_().clamp_(0, 15)
    error = (codes * wide_scale).add_(wide_minimum).sub_(rows).square_().sum(-1, keepdim=True)
    return torch.cat((scale, minimum), dim=-1), codes, error


def _fit_line(rows: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) of the least squares of scale * code + minimum - value."""
    mean_code, mean = codes.mean(-1, keepdim=True), rows.mean(-1, keepdim=True)
    spread = codes - mean_code
    scale = (spread * rows).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True).clamp_(1)
    return scale, mean - scale * mean_code


_QUANTIZERS = {INT8: _quantize8, INT4_MIN: _quantize4_min}


def pack_blocks(blocks: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """Blocks uint8 (N, groups, block_bytes) to panels uint8 (N / PANEL, bytes of a panel)."""
    n, groups, _ = blocks.shape
    header, words = fmt.header_bytes, fmt.num_words
    packed = empty_weight(n // PANEL, groups, PANEL * fmt.block_bytes, dtype=torch.uint8)
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

# SPDX-License-Identifier: Apache-2.0
"""A weight that is quantised the moment its last shard is loaded.

Until its first shard comes it has a shape and no memory, so that never more than the layers being
loaded are held in the checkpoint's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from vllm.logger import init_logger
from vllm.model_executor.layers.cpu_ops.quant_format import (
    FORMAT_BY_BLOCK_BYTES,
    FORMAT_BY_NAME,
    GROUP,
    QuantFormat,
)
from vllm.model_executor.layers.cpu_ops.quant_packing import (
    dequantize,
    fills_panels,
    pack_blocks,
    quantize,
)

logger = init_logger(__name__)


class QuantizedParameter(Parameter):
    """A weight (num_outputs, num_inputs). Once it is complete, `data` is the packed weight of
    `format` (layers/cpu_ops/quant_format.py), or, where `format` is None, a plain one of
    `plain_dtype`.

    `wanted`: the format to quantise to; None keeps weights as they come. What comes is a tensor of
    floats, or uint8 rows of GGUF's blocks, whose length says which format they are of; those of as
    many bits as wanted are kept as well.
    `whole_inputs`: inputs of a row in the checkpoint, of which this may have a part.
    """

    wanted: QuantFormat | None
    format: QuantFormat | None
    plain_dtype: torch.dtype

    def __new__(
        cls,
        num_outputs: int,
        num_inputs: int,
        whole_inputs: int,
        plain_dtype: torch.dtype,
        wanted: QuantFormat | None,
    ) -> QuantizedParameter:
        no_memory = torch.empty((), dtype=plain_dtype).expand(num_outputs, num_inputs)
        self = super().__new__(cls, no_memory, requires_grad=False)
        self.wanted, self.format, self.plain_dtype = wanted, None, plain_dtype
        self._size, self._whole_inputs = (num_outputs, num_inputs), whole_inputs
        self._staged: Parameter | None = None
        self._staged_format: QuantFormat | None = None
        return self

    def stage(self, dtype: torch.dtype, fmt: QuantFormat | None = None) -> Parameter:
        """The plain parameter that shards are copied into until `finish`: blocks of `fmt` in uint8,
        or floats of `dtype`."""
        num_outputs, num_inputs = self._size
        if fmt is not None:
            num_inputs, dtype = num_inputs // GROUP * fmt.block_bytes, torch.uint8
        staged = Parameter(torch.empty(num_outputs, num_inputs, dtype=dtype), requires_grad=False)
        staged.__dict__.update(self._loading_notes())
        self._staged, self._staged_format = staged, fmt
        return staged

    def _loading_notes(self) -> dict[str, Any]:
        """What layers' loaders read and change; `pending_shards` is one set with ours."""
        names = ("input_dim", "output_dim", "pending_shards")
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    def load(
        self, plain_loader: Callable[..., None], loaded: torch.Tensor, *shard_id: Any
    ) -> None:
        """Load one tensor of a checkpoint by the loader that a plain parameter has."""
        fmt = self._format_of(loaded)
        if fmt is not None and self.wanted is not None and fmt.bits != self.wanted.bits:
            loaded, fmt = dequantize(_blocks(loaded, fmt), fmt), None
        if self._staged is None:
            if "pending_shards" in self.__dict__ and not self.__dict__["pending_shards"]:
                raise ValueError("the checkpoint has it twice")
            self.stage(loaded.dtype, fmt)
        elif fmt != self._staged_format:  # shards of several kinds: they meet as floats
            self._make_staged_plain()
        if fmt is not None and self._staged_format is None:
            loaded = dequantize(_blocks(loaded, fmt), fmt)
        plain_loader(self._staged, loaded, *shard_id)
        if not self._staged.__dict__.get("pending_shards"):
            self.finish()

    def _format_of(self, loaded: torch.Tensor) -> QuantFormat | None:
        """Of raw rows; None for floats. Raises ValueError for rows of another length."""
        if loaded.dtype is not torch.uint8:
            return None
        block_bytes, rest = divmod(loaded.shape[-1] * GROUP, self._whole_inputs)
        if rest or block_bytes not in FORMAT_BY_BLOCK_BYTES:
            raise ValueError(
                f"its rows of {loaded.shape[-1]} bytes in the checkpoint do not hold "
                f"{self._whole_inputs} inputs"
            )
        return FORMAT_BY_BLOCK_BYTES[block_bytes]

    def _make_staged_plain(self) -> None:
        fmt, staged = self._staged_format, self._staged
        if fmt is not None:
            dtype = self.plain_dtype if self.wanted is None else torch.float32
            self.stage(dtype).data.copy_(dequantize(_blocks(staged.data, fmt), fmt))

    def finish(self) -> None:
        """Quantise and pack what is staged, if anything is."""
        if self._staged is None:
            return
        staged, fmt = self._staged.data, self._staged_format
        self._staged, self._staged_format, self.format = None, None, None
        can_pack = fills_panels(*self._size)
        if fmt is None and self.wanted is not None and can_pack:
            fmt = self.wanted
            blocks = quantize(staged, fmt)
        elif fmt is not None:
            blocks = _blocks(staged, fmt)
        if fmt is None:
            self.data = staged.to(self.plain_dtype)
        elif not can_pack:
            self.data = dequantize(blocks, fmt).to(self.plain_dtype)
        else:
            self.data, self.format = pack_blocks(blocks, fmt), fmt


def _blocks(rows: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    return rows.contiguous().view(rows.shape[0], -1, fmt.block_bytes)


def report_weights(model: nn.Module, name: str) -> None:
    """Log how many bytes the weights have in which format.

    Raises:
        ValueError: none is quantised.
    """
    nbytes: dict[str, int] = {}
    for parameter in model.parameters():
        kind = _kind(parameter)
        nbytes[kind] = nbytes.get(kind, 0) + parameter.nbytes
    if not nbytes.keys() & FORMAT_BY_NAME.keys():
        raise ValueError(
            f"--quantization {name}: no weight of {type(model).__name__} is quantised (supported: "
            "linear layers whose sizes are multiples of 32; of GGUF files, tensors of type Q8_0, "
            "Q4_0 and Q4_1); leave the flag out"
        )
    parts = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(nbytes.items()))
    logger.info("Weights with --quantization %s: %s", name, parts)


def _kind(parameter: Parameter) -> str:
    if isinstance(parameter, QuantizedParameter) and parameter.format is not None:
        return parameter.format.name
    return str(parameter.dtype).removeprefix("torch.")

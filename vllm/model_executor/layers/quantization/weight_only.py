# SPDX-License-Identifier: Apache-2.0
"""`--quantization int8` and `int4`: weights of any checkpoint, quantised as they are loaded.

By groups of 32 inputs of an output: int8 with a float16 scale, int4 with a scale and a minimum. What
a GGUF file has in as many bits already is kept as it is. Layers whose sizes do not fill such groups,
norms, biases and positions stay in the model's dtype. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


class CpuQuantizationConfig(QuantizationConfig):
    """What the CPU's methods share: their settings are all in their name."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        import torch

        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # no GPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CpuQuantizationConfig:
        if config:
            raise ValueError(f"{cls.__name__} has no settings, got {', '.join(config)}")
        return cls()

    def formats(self) -> tuple[str | None, str | None]:
        """How linear layers' weights and tables are to be kept; None: as the checkpoint has them."""
        raise NotImplementedError

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.quantization.cpu_method import make_method

        return make_method(layer, *self.formats())


class Int8Config(CpuQuantizationConfig):
    """8 bits everywhere."""

    def get_name(self) -> str:
        return "int8"

    def formats(self) -> tuple[str | None, str | None]:
        return "int8", "int8"


class Int4Config(CpuQuantizationConfig):
    """4 bits in linear layers, 8 in embeddings and the output projection, which bear less."""

    def get_name(self) -> str:
        return "int4"

    def formats(self) -> tuple[str | None, str | None]:
        return "int4_min", "int8"

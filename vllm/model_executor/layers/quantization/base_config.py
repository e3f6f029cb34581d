# SPDX-License-Identifier: Apache-2.0
"""How a layer keeps its weights and multiplies with them. Imports no torch: configs hold it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class QuantizeMethodBase(ABC):
    """Makes a layer's weights and applies them."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any
    ) -> None:
        """Register the layer's parameters."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's product."""

    def embedding(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Rows of the weights; only of methods that can serve an embedding."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up embeddings")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Called once when all weights are there; may rearrange them."""


class QuantizationConfig(ABC):
    """Says which method each layer of a model takes."""

    packed_modules_mapping: dict[str, list[str]]

    def __init__(self) -> None:
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self) -> str:
        """Name of the scheme, as `--quantization` knows it."""

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """dtypes that activations may have."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """Least compute capability of a GPU."""

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]:
        """Files of a model directory that hold the scheme's settings."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Made of such a file's contents."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer; None leaves it unquantised."""

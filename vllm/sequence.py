# SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage hands to the next."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class IntermediateTensors:
    """Named tensors, each (num_tokens, ...). A slice picks the same tokens of every one."""

    tensors: dict[str, torch.Tensor]

    def __getitem__(self, key: str | slice) -> torch.Tensor | IntermediateTensors:
        if isinstance(key, str):
            return self.tensors[key]
        return IntermediateTensors({name: tensor[key] for name, tensor in self.tensors.items()})

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self.tensors.items()

    def __len__(self) -> int:
        return len(self.tensors)

    @staticmethod
    def empty_like(intermediate_tensors: IntermediateTensors) -> IntermediateTensors:
        import torch

        return IntermediateTensors(
            {name: torch.empty_like(tensor) for name, tensor in intermediate_tensors.items()}
        )

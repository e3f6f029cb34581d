# SPDX-License-Identifier: Apache-2.0
"""What a model may declare besides generating text."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.sequence import IntermediateTensors


@runtime_checkable
class SupportsPP(Protocol):
    """Its layers can be spread over pipeline stages. (Only one stage is supported so far.)"""

    supports_pp: ClassVar[Literal[True]] = True

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What a stage would hand on for `batch_size` tokens."""
        ...


def supports_pp(model: type[nn.Module] | nn.Module) -> bool:
    return getattr(model, "supports_pp", False)


@runtime_checkable
class ChecksAfterLoading(Protocol):
    """A model that can tell only with its weights whether it is served right."""

    def check_after_loading(self) -> None:
        """Raises ValueError where it is not."""
        ...


class SupportsQuant:
    """Its fused layers and renamed weights are known to quantisation schemes."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper | None] = None
    packed_modules_mapping: ClassVar[dict[str, list[str]]]

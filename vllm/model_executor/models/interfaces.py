# SPDX-License-Identifier: Apache-2.0
"""What a model may declare besides generating text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.sequence import IntermediateTensors

    # The encoder's outputs, one (num_encoder_tokens, hidden_size) an input: a list or tuple of
    # them, or all in one tensor (inputs, num_encoder_tokens, hidden_size).
    MultiModalEmbeddings: TypeAlias = list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]


def __getattr__(name: str) -> Any:
    """`MultiModalEmbeddings`, a type that plugins write unions with, names torch: it is imported
    when somebody asks."""
    if name != "MultiModalEmbeddings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    return list[torch.Tensor] | torch.Tensor | tuple[torch.Tensor, ...]


@runtime_checkable
class SupportsMultiModalEmbeddings(Protocol):
    """It takes other inputs than its own tokens."""

    supports_multimodal_embeddings: ClassVar[Literal[True]] = True

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size). Of an encoder-decoder model these are the
        decoder's tokens; what the encoder makes reaches them by cross-attention, never here."""
        ...


@runtime_checkable
class SupportsMultiModal(SupportsMultiModalEmbeddings, Protocol):
    """It has an encoder, whose inputs come with the prompt: see `MULTIMODAL_REGISTRY`."""

    supports_multimodal: ClassVar[Literal[True]] = True
    supports_multimodal_raw_input_only: ClassVar[bool] = False
    supports_encoder_tp_data: ClassVar[bool] = False
    requires_raw_input_tokens: ClassVar[bool] = False
    # `embed_multimodal` takes lists of inputs of unequal shape; otherwise it is called with those
    # of one shape at a time.
    supports_ragged_encoder_inputs: ClassVar[bool] = False

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands in a chat's text for the i-th (from 1) input; None: nothing does.

        Raises:
            ValueError: the model takes no such modality.
        """
        ...

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Runs the encoder over what the processor made of the inputs, batched."""
        ...

    def get_language_model(self) -> VllmModel:
        """The part that generates text."""
        ...

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.get_language_model().embed_input_ids(input_ids)


def supports_multimodal(model: type[object] | object) -> bool:
    return getattr(model, "supports_multimodal", False)


def supports_multimodal_embeddings(model: type[object] | object) -> bool:
    return getattr(model, "supports_multimodal_embeddings", False)


def supports_multimodal_raw_input_only(model: type[object] | object) -> bool:
    return getattr(model, "supports_multimodal_raw_input_only", False)


def requires_raw_input_tokens(model: type[object] | object) -> bool:
    return getattr(model, "requires_raw_input_tokens", False)


def supports_ragged_encoder_inputs(model: type[object] | object) -> bool:
    return getattr(model, "supports_ragged_encoder_inputs", False)


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
    quant_config: QuantizationConfig | None = None

# SPDX-License-Identifier: Apache-2.0
"""Running a model's encoder over the inputs of several requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import (
    SupportsMultiModal,
    supports_ragged_encoder_inputs,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems
from vllm.v1.outputs import RequestFailure

logger = init_logger(__name__)


class EncoderRunner:
    """Calls the model with as many inputs at once as it takes: those of equal shape, stacked, or
    all of them if the model says that it takes lists of unequal ones."""

    def __init__(self, model: SupportsMultiModal, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._takes_unequal = supports_ragged_encoder_inputs(model)

    def run(self, features: Sequence[MultiModalFeatureSpec]) -> list[torch.Tensor]:
        """The encoder's output of each input, (num_encoder_tokens, hidden_size).

        Raises:
            ValueError: the model made something else of an input than its processor announced.
        """
        batches: dict[Hashable, list[int]] = {}
        for index, feature in enumerate(features):
            batches.setdefault(self._batch_key(feature), []).append(index)
        outputs: dict[int, torch.Tensor] = {}
        for indices in batches.values():
            batch = [features[index] for index in indices]
            outputs.update(zip(indices, self._run_batch(batch), strict=True))
        return [outputs[index] for index in range(len(features))]

    def run_each(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[torch.Tensor | Exception]:
        """As `run`, but what is raised for an input stands in its place, and the others' outputs
        are made all the same."""
        try:
            return list(self.run(features))
        except Exception as error:  # Whatever the model makes of an input is that input's alone.
            if len(features) == 1:
                logger.debug("an encoder input", exc_info=error)
                return [error]
        return [self.run_each([feature])[0] for feature in features]

    def _batch_key(self, feature: MultiModalFeatureSpec) -> Hashable:
        if self._takes_unequal:
            return feature.modality
        data = feature.data.get_data()
        return feature.modality, tuple((name, _shape(data[name])) for name in sorted(data))

    def _run_batch(self, features: list[MultiModalFeatureSpec]) -> list[torch.Tensor]:
        items = MultiModalKwargsItems({features[0].modality: [f.data for f in features]})
        outputs = list(self._model.embed_multimodal(**items.get_data(device=self._device)))
        made = [tuple(output.shape[:-1]) for output in outputs]
        wanted = [(feature.mm_position.get_num_embeds(),) for feature in features]
        if made != wanted:
            raise ValueError(
                f"{type(self._model).__name__}.embed_multimodal returned outputs of {made} tokens "
                f"for {features[0].modality} inputs of {wanted}, as their processor announced"
            )
        return outputs


def encoder_failure(modality: str, error: Exception) -> RequestFailure:
    """What its user is told of a request whose encoder input raised `error`."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    message = f"its {modality} input could not be encoded: {said}"
    return RequestFailure(message, is_computed=False)


def _shape(data: Any) -> Hashable:
    if isinstance(data, torch.Tensor):
        return tuple(data.shape), data.dtype
    if isinstance(data, list | tuple):
        return tuple(_shape(one) for one in data)
    return type(data)

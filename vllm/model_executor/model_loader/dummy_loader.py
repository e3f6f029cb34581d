# SPDX-License-Identifier: Apache-2.0
"""Random weights: for measuring a model whose weights are not at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class DummyModelLoader(BaseModelLoader):
    """Fills every weight by its name and the model's seed, the same on each start."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is needed."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        initialize_dummy_weights(model, model_config, seed=model_config.seed)

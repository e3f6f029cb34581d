# SPDX-License-Identifier: Apache-2.0
"""From a config to a model without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import set_current_vllm_config

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import ModelConfig, VllmConfig


def get_model_architecture(model_config: ModelConfig) -> tuple[type[nn.Module], str]:
    """The class that serves the model and the architecture's name.

    Raises ValueError listing the supported architectures where there is none.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry.resolve_model_cls(model_config.architectures, model_config)


def initialize_model(
    vllm_config: VllmConfig,
    *,
    prefix: str = "",
    model_class: type[nn.Module] | None = None,
    model_config: ModelConfig | None = None,
) -> nn.Module:
    """The model with uninitialised weights; its layers enter the config's registry."""
    if model_class is None:
        model_class, _ = get_model_architecture(model_config or vllm_config.model_config)
    with set_current_vllm_config(vllm_config, check_compile=True, prefix=prefix):
        return model_class(vllm_config=vllm_config, prefix=prefix)

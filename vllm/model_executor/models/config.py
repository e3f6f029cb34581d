# SPDX-License-Identifier: Apache-2.0
"""Hooks by which a model changes the engine's config before it is sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class VerifyAndUpdateConfig:
    """Base of the hooks; each may change fields in place or raise ValueError."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Called when a VllmConfig with such a model is made."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Called when the model's config has been read."""


class NemotronParseConfig(VerifyAndUpdateConfig):
    """Its config.json is read without the code that comes with it."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        from vllm.transformers_utils.nemotron_parse import complete_config

        model_config.hf_config_dict = complete_config(model_config.hf_config_dict)


# Architecture -> its hooks. Out-of-tree models add theirs.
MODELS_CONFIG_MAP: dict[str, type[VerifyAndUpdateConfig]] = {
    "NemotronParseForConditionalGeneration": NemotronParseConfig,
}

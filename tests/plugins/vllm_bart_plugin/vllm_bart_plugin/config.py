# SPDX-License-Identifier: Apache-2.0
"""What the model changes of the engine's config."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig


class BartConfigHook(VerifyAndUpdateConfig):
    """Says in the config that it was here, which tests look for."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        vllm_config.additional_config["bart_plugin"] = True

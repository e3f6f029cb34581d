# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations


class LoRAConfig:
    """LoRA adapters, which are not supported: models name this class in their signatures, and
    `VllmConfig.lora_config` is None. Raises ValueError when made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError("LoRA adapters are not supported; merge them into the model's weights")

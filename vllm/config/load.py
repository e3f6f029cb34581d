# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from vllm.config.utils import config, hash_factors

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@config
class LoadConfig:
    """Where weights come from and how they are read."""

    load_format: str = "auto"
    """auto (by what is there), safetensors, gguf, or dummy (random weights)."""
    download_dir: str | None = None
    """Folder of the hub's cache; left out: Hugging Face's own."""
    model_loader_extra_config: dict[str, Any] = Field(default_factory=dict)
    """Options of an out-of-tree loader."""
    ignore_patterns: list[str] | str = Field(default_factory=lambda: ["original/**/*"])
    """Files of the model's folder that hold no weights to load."""
    use_tqdm_on_load: bool = True
    """Show progress while weights load."""

    @field_validator("load_format", mode="before")
    @classmethod
    def _lower(cls, value: str) -> str:
        return value.lower()

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation (nothing here)."""
        return hash_factors({})

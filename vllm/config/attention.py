# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, field_validator

from vllm.config.utils import config, hash_factors


@config(config=ConfigDict(arbitrary_types_allowed=True))
class AttentionConfig:
    """Which attention backend runs."""

    backend: Any = None
    """An attention backend by name, such as CPU_ATTN; left out: the platform's choice."""

    @field_validator("backend", mode="before")
    @classmethod
    def validate_backend_before(cls, value: Any) -> Any:
        """A backend's name becomes its `AttentionBackendEnum` member.

        Raises:
            ValueError: no backend has that name.
        """
        if not isinstance(value, str):
            return value
        if value.lower() == "auto":
            return None
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum[value.upper()]

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"backend": self.backend})

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import field
from typing import Any

from pydantic import ConfigDict, field_validator

from vllm.config.utils import config, hash_factors


@config(config=ConfigDict(arbitrary_types_allowed=True))
class AttentionConfig:
    """Which attention backend runs."""

    backend: Any = None
    """An attention backend by name, such as CPU_ATTN; left out: the platform's choice."""

    backend_per_kind: dict[str, Any] = field(default_factory=dict)
    """Attention backends by kind of KV cache, which win over `backend`: full_attention,
    sliding_window, cross_attention; such as {"sliding_window": "TRITON_ATTN"}."""

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

    @field_validator("backend_per_kind", mode="before")
    @classmethod
    def validate_backend_per_kind_before(cls, value: Any) -> Any:
        """Names become members, as of `backend`.

        Raises:
            ValueError: no kind or no backend has that name.
        """
        if not isinstance(value, dict):
            return value
        from vllm.v1.kv_cache_interface import ATTENTION_KINDS

        unknown = sorted(set(value) - {kind.value for kind in ATTENTION_KINDS})
        if unknown:
            known = ", ".join(kind.value for kind in ATTENTION_KINDS)
            raise ValueError(f"backend_per_kind: unknown kind {unknown[0]!r}; known: {known}")
        return {kind: cls.validate_backend_before(name) for kind, name in value.items()}

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"backend": self.backend, "per_kind": self.backend_per_kind})

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
from dataclasses import field
from typing import Any

from pydantic import ConfigDict

from vllm.config.utils import config, hash_factors


class CUDAGraphMode(enum.Enum):
    """Which steps are replayed from a recorded graph. Only NONE is supported yet."""

    NONE = 0


@config(config=ConfigDict(arbitrary_types_allowed=True))
class CompilationConfig:
    """How the model's forward pass is made fast, and the registry of its layers."""

    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    """Graph replay on devices that have it."""
    static_forward_context: dict[str, Any] = field(default_factory=dict, init=False)
    """Layer name -> attention layer; layers enter themselves when the model is made."""

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"cudagraph_mode": self.cudagraph_mode})

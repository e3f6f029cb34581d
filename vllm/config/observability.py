# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from vllm.config.utils import config, hash_factors


@config
class ObservabilityConfig:
    """What the engine tells about itself."""

    show_hidden_metrics_for_version: str | None = None
    """Show metrics that were hidden since this version (none are, here)."""

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation (nothing here)."""
        return hash_factors({})

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from vllm.config.utils import config, hash_factors

if TYPE_CHECKING:
    import torch


@config(config=ConfigDict(arbitrary_types_allowed=True))
class DeviceConfig:
    """The device: always the current platform's."""

    device_type: str = field(init=False, default="")
    """The platform's torch device type, such as cpu or cuda; set by the constructor."""
    device_control: Any = field(init=False, default=None)
    """Reserved for platforms."""

    def __post_init__(self) -> None:
        from vllm.platforms import current_platform

        self.device_type = current_platform.device_type
        if not self.device_type:
            raise RuntimeError("no device was found; VLLM_LOGGING_LEVEL=DEBUG shows what was tried")

    @property
    def device(self) -> torch.device:
        """The torch device that work runs on."""
        import torch

        return torch.device(self.device_type)

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"device_type": self.device_type})

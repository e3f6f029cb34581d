# SPDX-License-Identifier: Apache-2.0
"""What differs between model families, so that the runner need not ask which one it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup


class ModelState(ABC):
    """What a family keeps for each request, and what its model is called with."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model = model
        self.device = device

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A request got row `req_index`."""

    def remove_request(self, req_id: str) -> None:
        """A request is gone."""

    @abstractmethod
    def prepare_inputs(self, batch: InputBatch) -> dict[str, Any]:
        """The model's arguments for `batch`."""

    @abstractmethod
    def prepare_attn(
        self, batch: InputBatch, attn_groups: list[list[AttentionGroup]]
    ) -> dict[str, Any]:
        """Each layer's attention metadata for `batch`."""

# SPDX-License-Identifier: Apache-2.0
"""What differs between model families, so that the runner need not ask which one it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
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

    def execute_mm_encoder(
        self, scheduled_encoder_inputs: dict[str, list[int]]
    ) -> dict[str, Exception]:
        """Runs the encoder over these inputs: request id -> which of its `mm_features`. Returns
        what was raised for inputs that it made nothing of, by their identifier.

        Raises:
            ValueError: the model has no encoder.
        """
        if scheduled_encoder_inputs:
            raise ValueError(f"{type(self.model).__name__} has no encoder for the inputs of requests")
        return {}

    def free_encoder_outputs(self, mm_hashes: list[str]) -> None:
        """Outputs of inputs with these identifiers are not needed any more."""

    def prepare_dummy_inputs(
        self, num_reqs: int, num_tokens: int, run_encoder: bool = True
    ) -> dict[str, Any]:
        """The model's arguments for a profiling run of `num_tokens` tokens.

        Args:
            run_encoder: run the encoder, if there is one, over as much as a step may encode.
        """
        return {
            "input_ids": torch.zeros(num_tokens, dtype=torch.int32, device=self.device),
            "positions": torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
        }

    def dummy_encoder_inputs(self) -> list[MultiModalFeatureSpec]:
        """Inputs of a made-up request, of the largest size; none without an encoder."""
        return []

    @abstractmethod
    def prepare_inputs(self, batch: InputBatch) -> dict[str, Any]:
        """The model's arguments for `batch`."""

    @abstractmethod
    def prepare_attn(
        self, batch: InputBatch, attn_groups: list[list[AttentionGroup]]
    ) -> dict[str, Any]:
        """Each layer's attention metadata for `batch`."""

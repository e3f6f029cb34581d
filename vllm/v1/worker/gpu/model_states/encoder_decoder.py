# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models: the decoder's token ids and positions, and what the encoder made of the
inputs that this step encodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.multimodal.encoder_budget import dummy_encoder_input
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup


class EncoderDecoderModelState(ModelState):
    """Keeps each request's encoder inputs, and outputs by identifier until the scheduler names it
    as free: the step that encodes turns them into keys and values, later ones need only those."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, device: torch.device) -> None:
        super().__init__(vllm_config, model, device)
        self._encoder = EncoderRunner(model, device)
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        self._features[new_req_data.req_id] = new_req_data.mm_features

    def remove_request(self, req_id: str) -> None:
        self._features.pop(req_id, None)

    def free_encoder_outputs(self, mm_hashes: list[str]) -> None:
        for mm_hash in mm_hashes:
            self._outputs.pop(mm_hash, None)

    def execute_mm_encoder(
        self, scheduled_encoder_inputs: dict[str, list[int]]
    ) -> dict[str, Exception]:
        features = [
            self._features[req_id][input_id]
            for req_id, input_ids in scheduled_encoder_inputs.items()
            for input_id in input_ids
        ]
        errors = {}
        for feature, output in zip(features, self._encoder.run_each(features), strict=True):
            if isinstance(output, Exception):
                errors[feature.identifier] = output
            else:
                self._outputs[feature.identifier] = output
        return errors

    def prepare_inputs(self, batch: InputBatch) -> dict[str, Any]:
        outputs = [
            self._outputs[feature.identifier]
            for req_id in batch.encoded
            for feature in self._features[req_id]
        ]
        return {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "encoder_outputs": outputs,
        }

    def prepare_attn(
        self, batch: InputBatch, attn_groups: list[list[AttentionGroup]]
    ) -> dict[str, Any]:
        return build_attn_metadata(attn_groups, batch)

    def prepare_dummy_inputs(
        self, num_reqs: int, num_tokens: int, run_encoder: bool = True
    ) -> dict[str, Any]:
        """The encoder runs over as many of the largest inputs as a step may encode."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if run_encoder:
            budget = self.vllm_config.scheduler_config.max_num_encoder_input_tokens
            count = max(1, budget // self._largest.mm_position.get_num_embeds())
            inputs["encoder_outputs"] = self._encoder.run([self._largest] * count)
        return inputs

    def dummy_encoder_inputs(self) -> list[MultiModalFeatureSpec]:
        return [self._largest]

    @cached_property
    def _largest(self) -> MultiModalFeatureSpec:
        return dummy_encoder_input(self.vllm_config.model_config)

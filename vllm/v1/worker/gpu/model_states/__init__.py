# SPDX-License-Identifier: Apache-2.0
"""Model families."""

from __future__ import annotations

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState


def init_model_state(
    vllm_config: VllmConfig, model: nn.Module, device: torch.device
) -> ModelState:
    """The state object of the model's family."""
    if vllm_config.model_config.is_encoder_decoder:
        from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState

        return EncoderDecoderModelState(vllm_config, model, device)
    return DefaultModelState(vllm_config, model, device)

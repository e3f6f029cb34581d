# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models: token ids and positions in, causal attention over the request."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup


class DefaultModelState(ModelState):
    """Nothing is kept besides the runner's own states."""

    def prepare_inputs(self, batch: InputBatch) -> dict[str, Any]:
        return {"input_ids": batch.input_ids, "positions": batch.positions}

    def prepare_attn(
        self, batch: InputBatch, attn_groups: list[list[AttentionGroup]]
    ) -> dict[str, Any]:
        return build_attn_metadata(attn_groups, batch)

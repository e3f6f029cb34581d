# SPDX-License-Identifier: Apache-2.0
"""Attention layers."""

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

__all__ = ["Attention", "AttentionLayerBase"]

# SPDX-License-Identifier: Apache-2.0
"""Attention layers."""

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

__all__ = ["Attention", "AttentionLayerBase", "CrossAttention", "MMEncoderAttention"]
